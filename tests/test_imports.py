"""Allowed imports between packages, imports of torch and zmq, and the modules that processes load."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SERVICES = sorted(p.name for p in (ROOT / "services").iterdir() if (p / "__init__.py").exists())
MAY_TORCH = {"gpu_worker", "kv_transfer"}
# which services a service may import besides itself
USES = {"gpu_worker": {"kv_transfer"}, "offline": {"launcher"}, "bench": {"launcher", "offline"}}
USES |= {"cli": {"launcher", "offline", "bench", "api_gateway"}}
# the others start at __main__
MAINS = {"cli": ".main", "launcher": ".serve", "offline": ".llm", "bench": ".suite.command"}
ZMQ_HOMES = {
    f"shared/bus/{name}.py" for name in ("curve", "frame_links", "inbound", "outbound", "poller", "registry_link")
}
ZMQ_HOMES |= {"shared/bus/registry_socket.py", "shared/bus/sockets.py"}
# what reads text of clients: a regular expression over it may take time that is quadratic in its length, or worse
READS_CLIENT_TEXT = ("services/api_gateway", "services/tokenizer_pool", "services/detokenizer", "services/scheduler")
READS_CLIENT_TEXT += ("shared/ring_client", "shared/output_parsing", "shared/tool_parsers", "shared/reasoning_parsers")
HEAVY = ("torch", "triton", "transformers", "numpy")


def product_files() -> list[Path]:
    return sorted(p for top in ("services", "shared", "kernels") for p in (ROOT / top).rglob("*.py"))


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_allowed(path: Path, name: str) -> bool:
    """Whether a file may import this."""
    parts, top = path.relative_to(ROOT).parts, name.split(".", maxsplit=1)[0]
    if name.startswith("blockyard.services"):
        return parts[0] == "services" and name.split(".")[2] in {parts[1], *USES.get(parts[1], ())}
    if name.startswith("blockyard.kernels") or top in ("torch", "triton", "safetensors"):
        return parts[0] == "kernels" or (parts[0] == "services" and parts[1] in MAY_TORCH)
    if name.startswith("blockyard."):
        return name.startswith("blockyard.shared")
    if top == "zmq":
        return "/".join(parts) in ZMQ_HOMES or parts[:2] == ("services", "kv_transfer")
    return top not in ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve")


def test_arrows_point_one_way() -> None:
    found = [(path, name) for path in product_files() for name in imports(path)]
    assert [f"{path}: imports {name}" for path, name in found if not is_allowed(path, name)] == []


# parts of a service that import nothing else of their service or another
SHARED_ONLY = ("services/api_gateway/requests", "services/bench/load", "services/launcher/supervision")
SHARED_ONLY += ("services/launcher/models",)
# package -> its folders and modules, lowest first: each imports only itself and earlier ones
LAYERS: dict[str, tuple[str, ...]] = {
    "services/api_gateway": (
        "requests",
        "apis",
        "adapter_folders",
        "bodies",
        "responses",
        "metrics",
        "pooling_pipeline",
        "request_pipeline",
        "stored_responses",
        "service",
        "turns",
        "batches",
        "batch_api",
        "http",
        "endpoints",
        "api_tables",
        "server",
        "garbage",
        "__main__",
    ),
}
LAYERS["shared"] = (
    "errors",
    "lora",
    "architectures",
    "charts",
    "percentiles",
    "measured_file",
    "progress_bars",
    "token_ids",
    "json_objects",
    "weight_files",
    "context_length",
    "quantization",
    "chat_template_files",
)
LAYERS["shared"] += ("tokenizer_files", "messages", "block_hashes")
LAYERS["shared"] += ("grammars", "output_parsing", "tool_parsers", "reasoning_parsers", "parser_plugins")
LAYERS["shared"] += ("config", "process", "bus", "ring_client")
LAYERS["shared/output_parsing"] = ("parts", "cut_calls", "markers", "text_input", "json_text", "reader", "compose")
LAYERS["shared/grammars"] = (
    "engine_order",
    "error_texts",
    "format_patterns",
    "interface",
    "json_schemas",
    "lark_sources",
    "schemas",
    "matching",
    "token_texts",
    "trial_walks",
    "guidance",
    "xgrammar_engine",
)
LAYERS["shared/grammars"] += ("outlines_engine", "lm_format_enforcer_engine", "engines")
LAYERS["shared/grammars/json_schemas"] = ("patterns", "keywords", "normal_form", "rules", "engine_schemas")
LAYERS["shared/quantization"] = ("reading", "integers", "floats", "groups", "table", "method", "files")
LAYERS["shared/messages"] = ("base", "adapters", "grammars", "requests", "pooling", "streams", "kv_transfer", "steps")
LAYERS["shared/messages"] += ("text", "controls", "model_settings", "membership", "metrics", "stored_responses")
LAYERS["shared/messages"] += ("rank_bench",)
LAYERS["shared/bus"] = ("curve", "frames", "member_list", "sockets", "poller", "registry_socket", "registry_link")
LAYERS["shared/bus"] += ("frame_links", "ring_query", "inbound", "outbound", "links")
LAYERS["shared/config"] = (
    "text_part",
    "services",
    "flags",
    "flag_values",
    "parsed_flags",
    "model_bounds",
    "worker_fields",
)
LAYERS["shared/config"] += (
    "kv_transfer",
    "adapters",
    "structured_outputs",
    "host_memory",
    "checkpoint",
    "pooling",
    "server",
    "output_parsers",
    "worker_roles",
    "resolve",
    "parser_documents",
    "model_documents",
    "quantization_documents",
)
LAYERS["shared/ring_client"] = (
    "ring_links",
    "request_fields",
    "choice_reader",
    "lost_adapters",
    "schedulers",
    "controls",
    "grammar_verdicts",
)
LAYERS["shared/ring_client"] += (
    "tokenizer_jobs",
    "tokenizer_client",
    "open_entry",
    "journal",
    "pooled_entry",
    "metrics",
    "recovery",
    "fanout",
    "pooling",
    "client",
)
LAYERS["services/tokenizer_pool"] = (
    "workers",
    "token_chars",
    "token_spans",
    "chats",
    "fill_in_middle",
    "text_batches",
    "text_codec",
    "adapter_codecs",
    "text_worker",
)
LAYERS["services/tokenizer_pool"] += ("grammar_worker", "grammar_checks", "service", "__main__")
LAYERS["services/tokenizer_pool/chats"] = (
    "sandbox",
    "chat_messages",
    "instruction_turns",
    "chat_template",
    "pair_template",
    "text_template",
)
LAYERS["services/tokenizer_pool/workers"] = ("worker_frames", "job_limits", "fork_server", "job_turns", "job_queue")
LAYERS["services/tokenizer_pool/workers"] += ("job_workers",)
LAYERS["services/detokenizer"] = ("token_table", "text_decoder", "repetition", "stream", "streams", "service")
LAYERS["services/detokenizer"] += ("__main__",)
LAYERS["services/launcher/supervision"] = ("child", "run_dir", "hung", "start_up", "supervisor", "ring")
LAYERS["services/bench/load"] = ("http_response", "results", "client", "monitor", "client_process", "processes")
LAYERS["services/bench/parallel"] = ("layouts", "rank_sums", "measures", "items", "tables", "rows", "run", "command")
LAYERS["services/bench/suite"] = ("shapes", "served", "measures", "item", "adapters", "pooling", "items", "command")
LAYERS["services/launcher"] = ("supervision", "models", "sources", "executors", "ports", "serve")
LAYERS["services/launcher"] += ("rank_host", "multi_host", "batches")
LAYERS["services/offline"] = (
    "sampling_params",
    "adapters",
    "answers",
    "outputs",
    "prompts",
    "inflight",
    "batch",
    "progress",
)
LAYERS["services/offline"] += (
    "session",
    "engine_args",
    "metrics",
    "operations",
    "tokenizer",
    "beam_search",
    "external_launcher",
    "running_model",
    "pooling",
    "engines",
    "llm",
    "commands",
)
LAYERS["services/offline/adapters"] = ("requests", "loading")
LAYERS["services/offline/commands"] = ("tune", "quantize")
LAYERS["services/offline/external_launcher"] = ("environment", "processes", "following_session")
LAYERS["services/offline/engines"] = ("live_request", "llm_engine", "async_operations", "async_engine")
LAYERS["services/bench"] = ("load", "metrics", "datasets", "workload", "server", "report", "flags", "serve")
LAYERS["services/bench"] += ("latency_throughput", "suite", "prefill_decode", "parallel", "simulate", "command")
LAYERS["services/kv_transfer"] = (
    "layout",
    "routes",
    "sender_processes",
    "protocol",
    "copy_thread",
    "device",
    "arena",
    "staging",
    "host",
    "host_copies",
)
LAYERS["services/kv_transfer"] += ("block_copier", "device_copier", "link_sockets", "connectors", "sender_link")
LAYERS["services/kv_transfer"] += ("receiver", "transfer_blocks", "link_counts", "sender_links", "endpoint")
LAYERS["services/kv_transfer/device"] = ("ipc_memory", "stream_copies")
LAYERS["services/kv_transfer/host"] = ("host_store", "stream_store")
LAYERS["services/kv_transfer/protocol"] = ("events", "bit_masks", "drops", "frames", "outgoing", "incoming")
LAYERS["services/kv_transfer/connectors"] = (
    "interface",
    "mapped",
    "tcp",
    "nixl_import",
    "nixl_agent",
    "nixl",
    "nixl_access",
)
LAYERS["services/kv_transfer/connectors"] += ("faults", "selection")
LAYERS["services/gpu_worker"] = (
    "arrays",
    "interfaces",
    "cores",
    "memory",
    "host_link",
    "child_processes",
    "step",
    "slots",
    "parallel",
    "loading",
    "quantization",
    "quantize",
    "layers",
)
LAYERS["services/gpu_worker"] += (
    "models",
    "lora",
    "prompt_adapters",
    "kv",
    "linear_tuning",
    "attention",
    "structured_output",
    "sampling",
    "pooling",
    "batch",
    "execution",
    "runner",
)
LAYERS["services/gpu_worker"] += (
    "warm_up",
    "compilation",
    "memory_profile",
    "startup",
    "encoders",
    "engine",
    "mock",
    "transfers",
    "ranks",
    "bench",
)
LAYERS["services/gpu_worker"] += ("counters", "session", "service", "__main__")
LAYERS["kernels"] = (
    "int_math",
    "gpu_facts",
    "programmatic_launch",
    "tensor_checks",
    "slots",
    "sampling",
    "all_reduce",
    "layers",
    "kv_cache",
)
LAYERS["kernels"] += ("attention", "quantized", "moe", "lora")

LAYERS["services/scheduler"] = ("outbox", "plan_pacer", "adapters", "sequences", "kv_cache", "batch", "queue")
LAYERS["services/scheduler"] += ("transfers",)
LAYERS["services/scheduler"] += (
    "lifecycle",
    "admission",
    "workers",
    "planning",
    "core",
    "from_config",
    "report",
    "service",
)
LAYERS["services/scheduler"] += ("simulator", "__main__")


@pytest.mark.parametrize("package", LAYERS)
def test_layers_import_only_lower_layers(package: str) -> None:
    layers, dotted = LAYERS[package], f"blockyard.{package.replace('/', '.')}."
    for path in (ROOT / package).rglob("*.py"):
        own = path.relative_to(ROOT / package).with_suffix("").parts[0]
        if own != "__init__":
            used = {name.removeprefix(dotted).split(".")[0] for name in imports(path) if name.startswith(dotted)}
            allowed = layers[: layers.index(own) + 1]
            assert used <= set(allowed), f"{path}: imports {used - set(allowed)}"


@pytest.mark.parametrize("folder", SHARED_ONLY)
def test_folders_that_import_shared_only(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        ours = [f"{name}." for name in imports(path) if name.startswith("blockyard.")]
        allowed = ("blockyard.shared.", f"blockyard.{folder.replace('/', '.')}.")
        assert [name for name in ours if not name.startswith(allowed)] == [], path


def test_modules_import_each_other_in_no_cycle() -> None:
    """Counts imports inside functions too."""
    modules = {
        "blockyard." + ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in product_files()
    }
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for module, path in modules.items():
        used = {name if name in modules else name.rpartition(".")[0] for name in imports(path)}
        sorter.add(module, *((used & modules.keys()) - {module}))
    sorter.prepare()  # raises CycleError, which names the modules


def test_no_regular_expression_reads_client_text() -> None:
    paths = [path for folder in READS_CLIENT_TEXT for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 50
    # the operator gives the pattern, and the names have few characters
    paths.remove(ROOT / "shared/ring_client/request_fields/logits_processors.py")
    assert [str(p) for p in paths if {"re", "regex", "re.compile", "fnmatch"} & set(imports(p))] == []


@pytest.mark.parametrize("service", [s for s in SERVICES if s not in MAY_TORCH])
def test_a_service_process_never_loads_torch(service: str) -> None:
    """Imports the service's main module in a process and lists the heavy packages that this loaded."""
    module = f"blockyard.services.{service}{MAINS.get(service, '.__main__')}"
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT / ".src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_the_repository_root_is_not_on_the_path() -> None:
    """transformers would take the folder `kernels` for the package of that name; `make test` passes -P for this."""
    assert ROOT not in {Path(entry).resolve() for entry in sys.path}
