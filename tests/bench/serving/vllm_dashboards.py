"""What the panels of vLLM's published Grafana dashboards ask Prometheus for: series, and the labels that they match or
sum by. Written down from examples/online_serving of its repository; `le` and the label of a pod are not repeated.

The dashboards for Kubernetes read through an OpenTelemetry collector, which drops `_total` from the names of counters.
"""

MODEL = ("model_name",)
NONE: tuple[str, ...] = ()

_E2E, _TTFT = "vllm:e2e_request_latency_seconds", "vllm:time_to_first_token_seconds"
_ITL, _TPOT = "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"


def _latency(family: str, labels: tuple[str, ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((f"{family}_{part}", labels) for part in ("bucket", "sum", "count"))


PANELS: dict[str, dict[str, tuple[tuple[str, tuple[str, ...]], ...]]] = {
    "dashboards/grafana/performance_statistics.json": {
        "E2E Latency": _latency(_E2E, NONE),
        "TTFT": _latency(_TTFT, NONE),
        "ITL": _latency(_ITL, NONE),
        "TPS (Tokens Per Second) Over Time": (
            ("vllm:generation_tokens_total", NONE),
            ("vllm:prompt_tokens_total", NONE),
            ("vllm:iteration_tokens_total_count", NONE),
        ),
        "variable Deployment_id": (("vllm:generation_tokens_total", MODEL),),
    },
    "dashboards/grafana/query_statistics.json": {
        "Successful Requests Over Time": (("vllm:request_success_total", MODEL),),
        "Latency": ((f"{_E2E}_bucket", MODEL),),
        "Input Token Size": (
            ("vllm:request_prompt_tokens_bucket", MODEL),
            ("vllm:prompt_tokens_total", MODEL),
            ("vllm:request_success_total", MODEL),
        ),
        "Output Tokens Over Time": (("vllm:generation_tokens_total", MODEL),),
    },
    "prometheus_grafana/grafana.json": {
        "E2E Request Latency": _latency(_E2E, MODEL),
        "Token Throughput": (("vllm:prompt_tokens_total", MODEL), ("vllm:generation_tokens_total", MODEL)),
        "Time Per Output Token Latency, today": _latency(_ITL, MODEL),
        "Time Per Output Token Latency, until 0.11": _latency(_TPOT, MODEL),
        "Scheduler State": (("vllm:num_requests_running", MODEL), ("vllm:num_requests_waiting", MODEL)),
        "Time To First Token Latency": _latency(_TTFT, MODEL),
        "Cache Utilization, today": (("vllm:kv_cache_usage_perc", MODEL),),
        "Cache Utilization, until 0.9": (("vllm:gpu_cache_usage_perc", MODEL),),
        "Request Prompt Length": (("vllm:request_prompt_tokens_bucket", MODEL),),
        "Request Generation Length": (("vllm:request_generation_tokens_bucket", MODEL),),
        "Finish Reason": (("vllm:request_success_total", (*MODEL, "finished_reason")),),
        "Queue Time": (("vllm:request_queue_time_seconds_sum", MODEL),),
        "Requests Prefill and Decode Time": (
            ("vllm:request_prefill_time_seconds_sum", MODEL),
            ("vllm:request_decode_time_seconds_sum", MODEL),
        ),
        "Max Generation Token in Sequence Group": (("vllm:request_max_num_generation_tokens_sum", MODEL),),
    },
    "prometheus_grafana/k8s-monitoring/grafana-dashboard.json": {
        "Total Requests": (("vllm:num_requests_running", MODEL), ("vllm:num_requests_waiting", MODEL)),
        "Request Rate by Finish Reason": (("vllm:request_success", (*MODEL, "finished_reason")),),
        "Token Throughput (Fleet)": (("vllm:prompt_tokens", MODEL), ("vllm:generation_tokens", MODEL)),
        "Avg KV Cache Usage": (("vllm:kv_cache_usage_perc", MODEL),),
        "E2E Request Latency": _latency(_E2E, MODEL),
        "Time to First Token (TTFT)": _latency(_TTFT, MODEL),
        "Inter-Token Latency (TPOT/ITL)": _latency(_ITL, MODEL),
        "Request Phase Latency (p95)": (
            ("vllm:request_queue_time_seconds_bucket", MODEL),
            ("vllm:request_prefill_time_seconds_bucket", MODEL),
            ("vllm:request_decode_time_seconds_bucket", MODEL),
        ),
        "Prompt Length Distribution": (("vllm:request_prompt_tokens_bucket", MODEL),),
        "Generation Length Distribution": (("vllm:request_generation_tokens_bucket", MODEL),),
        "Prefix Cache Hit Rate": (("vllm:prefix_cache_hits", MODEL), ("vllm:prefix_cache_queries", MODEL)),
        "Preemption Rate": (("vllm:num_preemptions", MODEL),),
        "Iteration Batch Size": (("vllm:iteration_tokens_total_bucket", MODEL),),
    },
}
