"""Reads modules.json of sentence-transformers and the folders of the modules that it lists."""

from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec

from blockyard.shared.config.pooling.modes import OF_SENTENCES, PoolingMode
from blockyard.shared.errors import ConfigError
from blockyard.shared.json_objects import read_json

T = TypeVar("T", bound=msgspec.Struct)

FILE = "modules.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # of a module
EMBEDDING = "sentence_embedding"  # what modules read and write behind the pooling
# in the order in which sentence-transformers joins the vectors of modes
_BOOLEANS = {
    "pooling_mode_cls_token": PoolingMode.CLS,
    "pooling_mode_max_tokens": PoolingMode.MAX,
    "pooling_mode_mean_tokens": PoolingMode.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": PoolingMode.MEAN_SQRT_LEN,
    "pooling_mode_weightedmean_tokens": PoolingMode.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": PoolingMode.LAST,
}
PACKAGE = "sentence_transformers."  # of the modules that it loads without trust_remote_code
_TRANSFORMER, _POOLING, _DENSE, _NORMALIZE, _LOGIT_SCORE = "Transformer", "Pooling", "Dense", "Normalize", "LogitScore"
SUPPORTED = (_TRANSFORMER, _POOLING, _DENSE, _NORMALIZE, _LOGIT_SCORE)
TORCH_ACTIVATIONS = ("Identity", "Tanh", "Sigmoid", "ReLU", "GELU", "SiLU", "Softmax")


class PoolingModule(msgspec.Struct, frozen=True, kw_only=True):
    """1_Pooling: hidden states of the tokens -> the vectors of all modes, joined."""

    modes: tuple[PoolingMode, ...]
    width: int  # of hidden states
    include_prompt: bool = True


class DenseModule(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix with a bias and a function behind it."""

    in_features: int
    out_features: int
    folder: str  # with its weights, inside the model's
    bias: bool = True
    activation: str = "Tanh"  # the class of torch.nn
    use_residual: bool = False


class NormalizeModule(msgspec.Struct, frozen=True):
    """Divides a vector by its length."""


class LogitScoreModule(msgspec.Struct, frozen=True, kw_only=True):
    """The score is the logit of a token, or the difference of two."""

    true_token_id: int
    false_token_id: int | None = None


class SentenceModules(msgspec.Struct, frozen=True, kw_only=True):
    """The modules of a folder. One of `pooling` and `logit_score` is None; both are where the model is a classifier."""

    pooling: PoolingModule | None = None
    behind: tuple[DenseModule | NormalizeModule, ...] = ()  # the pooling, in order
    logit_score: LogitScoreModule | None = None
    transformer_folder: str = ""  # with config.json and the weights, inside the model's

    @property
    def joins_dense(self) -> bool:
        """Whether dense layers read the vectors of several modes, joined."""
        has_dense = any(isinstance(one, DenseModule) for one in self.behind)
        return has_dense and self.pooling is not None and len(self.pooling.modes) > 1


class _ModuleEntry(msgspec.Struct, frozen=True):
    type: str
    path: str = ""
    name: str | None = None


class _PoolingFile(msgspec.Struct, frozen=True):
    embedding_dimension: int | None = None
    word_embedding_dimension: int | None = None  # the older name
    pooling_mode: str | list[str] | None = None
    include_prompt: bool = True


class _DenseFile(msgspec.Struct, frozen=True):
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: str = EMBEDDING
    module_output_name: str | None = None
    use_residual: bool = False


class _NormalizeFile(msgspec.Struct, frozen=True):
    module_input_name: str = EMBEDDING
    module_output_name: str | None = None


def read_modules(folder: Path) -> SentenceModules | None:
    """Returns the modules of a model's folder; None: it has no modules.json.

    Raises ConfigError for modules that are not supported, by name, and for files that contradict each other.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    found = SentenceModules()
    for i, entry in enumerate(_entries(path)):
        kind = entry.type.rsplit(".", 1)[-1]  # the path before it changed between releases
        if not entry.type.startswith(PACKAGE):
            text = f"module {entry.type} is code of another package, which is not run; {', '.join(SUPPORTED)} are read"
            raise ConfigError(f"{path}: {text}")
        if kind not in SUPPORTED:
            raise ConfigError(f"{path}: module {entry.type} is not supported; {', '.join(SUPPORTED)} are")
        if (kind == _TRANSFORMER) != (i == 0):
            raise ConfigError(f"{path}: the first module, and no other, has to be a Transformer; module {i} is {kind}")
        found = _with_module(found, kind, folder, _inside(path, entry.path))
    if found.pooling is not None and found.logit_score is not None:
        raise ConfigError(f"{path}: a model has Pooling or LogitScore, not both")
    return found


def transformer_folder(folder: Path) -> str:
    """Returns the folder with config.json and weights inside a model's; "": they are in its own. Raises ConfigError."""
    path = folder / FILE
    first = _entries(path)[0] if path.is_file() else None
    return _inside(path, first.path) if first is not None and first.type.endswith(f".{_TRANSFORMER}") else ""


def module_folders(folder: Path) -> list[str]:
    """Returns the folders of the modules inside a model's, without the model's own. Raises ConfigError."""
    path = folder / FILE
    return [name for one in _entries(path) if (name := _inside(path, one.path))] if path.is_file() else []


def _entries(path: Path) -> list[_ModuleEntry]:
    """The modules in the order in which they run: that of the file. sentence-transformers does not read `idx`."""
    try:
        listed = msgspec.json.decode(path.read_bytes(), type=list[_ModuleEntry])
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from e
    except msgspec.MsgspecError as e:
        raise ConfigError(f"{path}: {e}") from e
    if not listed:
        raise ConfigError(f"{path} lists no modules")
    names = [entry.name for entry in listed if entry.name is not None]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(f"{path} has two modules with the name {twice[0]!r}")
    return listed


def _inside(path: Path, name: str) -> str:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ConfigError(f"{path}: module path {name!r} is outside of the folder")
    return name


def _with_module(found: SentenceModules, kind: str, folder: Path, name: str) -> SentenceModules:
    replace, where = msgspec.structs.replace, folder / name
    match kind:
        case "Transformer":
            return replace(found, transformer_folder=name)
        case "Pooling":
            if found.pooling is not None or found.behind:
                raise ConfigError(f"{folder / FILE}: a second Pooling, or one behind Dense or Normalize")
            return replace(found, pooling=read_pooling(where / "config.json"))
        case "LogitScore":
            return replace(found, logit_score=_convert(where / "config.json", LogitScoreModule))
    if found.pooling is None:
        raise ConfigError(f"{folder / FILE}: {kind} before the Pooling is not supported")
    if kind == _NORMALIZE:
        _check_normalize(where / "config.json")
        return replace(found, behind=(*found.behind, NormalizeModule()))
    dense = _read_dense(folder, name)
    if dense.in_features != (width := width_behind(found)):
        raise ConfigError(
            f"{where / 'config.json'}: in_features {dense.in_features} does not fit the {width} numbers before it"
        )
    return replace(found, behind=(*found.behind, dense))


def width_behind(modules: SentenceModules, hidden_size: int | None = None) -> int:
    """Returns the numbers of the vector behind all modules. hidden_size: in place of what the pooling says."""
    assert modules.pooling is not None, "a LogitScore makes one number"
    width = (hidden_size or modules.pooling.width) * len(modules.pooling.modes)
    for module in modules.behind:
        if isinstance(module, DenseModule):
            width = module.out_features
    return width


def read_pooling(path: Path) -> PoolingModule:
    """Reads 1_Pooling/config.json, with booleans or with names of modes. Raises ConfigError."""
    values = read_json(path)
    file = _convert(path, _PoolingFile, values)
    width = file.embedding_dimension or file.word_embedding_dimension
    if width is None or width < 1:
        raise ConfigError(f"{path}: embedding_dimension is {width}, a width is needed")
    if file.pooling_mode is None:
        flags = [key for key in values if key.startswith("pooling_mode_")]
        if unknown := [key for key in flags if key not in _BOOLEANS]:
            raise ConfigError(f"{path}: {unknown[0]} is not supported; {', '.join(_BOOLEANS)} are")
        modes = tuple(mode for key, mode in _BOOLEANS.items() if values.get(key)) or (PoolingMode.MEAN,)
    else:
        names = [file.pooling_mode] if isinstance(file.pooling_mode, str) else file.pooling_mode
        known = {mode.value: mode for mode in OF_SENTENCES}
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(f"{path}: pooling_mode {unknown[0]!r} is not supported; {', '.join(known)} are")
        if not names:
            raise ConfigError(f"{path}: pooling_mode is an empty list")
        modes = tuple(known[name] for name in names)
    return PoolingModule(modes=modes, width=width, include_prompt=file.include_prompt)


def _read_dense(folder: Path, name: str) -> DenseModule:
    path = folder / name / "config.json"
    file = _convert(path, _DenseFile)
    _check_input(path, file.module_input_name, file.module_output_name)
    activation = file.activation_function
    known = activation.rsplit(".", 1)[-1]
    if not activation.startswith("torch.nn.") or known not in TORCH_ACTIVATIONS:
        named = ", ".join(TORCH_ACTIVATIONS)
        raise ConfigError(f"{path}: activation_function {activation!r} is not supported; torch.nn's {named} are")
    if not any((folder / name / file_name).is_file() for file_name in WEIGHTS):
        raise ConfigError(f"{folder / name}: no weights of this Dense module ({' or '.join(WEIGHTS)})")
    return DenseModule(
        in_features=file.in_features,
        out_features=file.out_features,
        folder=name,
        bias=file.bias,
        activation=known,
        use_residual=file.use_residual,
    )


def _check_normalize(path: Path) -> None:
    if path.is_file():  # older releases write none
        file = _convert(path, _NormalizeFile)
        _check_input(path, file.module_input_name, file.module_output_name)


def _check_input(path: Path, reads: str, writes: str | None) -> None:
    for field, value in (("module_input_name", reads), ("module_output_name", writes or reads)):
        if value != EMBEDDING:
            raise ConfigError(f"{path}: {field} {value!r} is not supported; {EMBEDDING!r} is")


def _convert(path: Path, kind: type[T], values: dict[str, Any] | None = None) -> T:
    try:
        return msgspec.convert(read_json(path) if values is None else values, kind)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{path}: {e}") from e
