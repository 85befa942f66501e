"""What goes first: the flag, the folder, the default of the model."""

import msgspec
import pytest

from blockyard.shared.config.pooling.activations import Activation, choose_activation, num_labels
from blockyard.shared.config.pooling.modes import PoolingMode
from blockyard.shared.config.pooling.output_kinds import OutputKind, default_pooling
from blockyard.shared.config.pooling.pooler_config import PoolerOverrides, read_overrides
from blockyard.shared.config.pooling.pooling_choice import choose_pooling, dimensions_problem
from blockyard.shared.config.pooling.sentence_modules import (
    DenseModule,
    NormalizeModule,
    PoolingModule,
    SentenceModules,
)
from blockyard.shared.errors import ConfigError

NOTHING = PoolerOverrides()
DENSE = DenseModule(in_features=8, out_features=4, folder="2_Dense")
MEAN = PoolingModule(modes=(PoolingMode.MEAN,), width=8)


def _folder(*behind: DenseModule | NormalizeModule, pooling: PoolingModule = MEAN) -> SentenceModules:
    return SentenceModules(pooling=pooling, behind=behind)


def test_default_of_the_model() -> None:
    found = choose_pooling(PoolingMode.LAST, 8, None, NOTHING)
    assert (found.modes, found.width, found.normalize) == ((PoolingMode.LAST,), 8, True)
    assert found.describe() == "pooling: LAST (default of the model), 8 numbers, normalized"


@pytest.mark.parametrize(
    ("kind", "has_kv", "config", "mode"),
    [
        (OutputKind.NONE, True, {}, PoolingMode.LAST),
        (OutputKind.CLASSES, True, {}, PoolingMode.LAST),
        (OutputKind.NONE, False, {}, PoolingMode.CLS),
        (OutputKind.CLASSES, False, {"classifier_pooling": "mean"}, PoolingMode.MEAN),
        (OutputKind.CLASSES, False, {"use_bidirectional_attention": True}, PoolingMode.LAST),
        (OutputKind.NONE, False, {"use_bidirectional_attention": True}, PoolingMode.MEAN),
        (OutputKind.TOKENS, False, {"is_causal": False}, PoolingMode.MEAN),
        (OutputKind.TOKEN_CLASSES, False, {}, PoolingMode.ALL),
    ],
)
def test_the_default_of_an_output_layer(
    kind: OutputKind, has_kv: bool, config: dict[str, object], mode: PoolingMode
) -> None:
    assert default_pooling(kind, has_kv=has_kv, config=config) is mode


def test_the_folder_goes_before_the_default() -> None:
    found = choose_pooling(PoolingMode.LAST, 8, _folder(NormalizeModule(), DENSE), NOTHING)
    assert (found.modes, found.width, found.dense) == ((PoolingMode.MEAN,), 4, (DENSE,))
    assert (found.normalize, found.normalize_before) == (False, (0,))
    assert found.describe() == "pooling: MEAN (modules.json), dense 8 to 4, 4 numbers, not normalized"
    assert choose_pooling(PoolingMode.LAST, 8, _folder(DENSE, NormalizeModule()), NOTHING).normalize


def test_the_flag_goes_before_the_folder() -> None:
    given = read_overrides({"pooling_type": "cls", "normalize": True})
    found = choose_pooling(PoolingMode.LAST, 8, _folder(DENSE), given)
    assert (found.modes, found.dense, found.normalize) == ((PoolingMode.CLS,), (DENSE,), True)
    assert found.source == "--override-pooler-config"
    tokens = choose_pooling(PoolingMode.LAST, 8, _folder(DENSE), read_overrides({"pooling_type": "ALL"}))
    assert (tokens.dense, tokens.width) == ((DENSE,), 4)
    joined = _folder(DENSE, pooling=PoolingModule(modes=(PoolingMode.MEAN, PoolingMode.CLS), width=4))
    tokens = choose_pooling(PoolingMode.LAST, 4, joined, read_overrides({"pooling_type": "ALL"}))
    assert (tokens.dense, tokens.width) == ((), 4)


def test_a_folder_that_cuts_vectors() -> None:
    found = choose_pooling(PoolingMode.LAST, 8, _folder(NormalizeModule()), NOTHING, truncate_dim=3)
    assert (found.width, found.truncate_dim) == (3, 3)
    assert found.describe() == "pooling: MEAN (modules.json), 3 numbers (truncate_dim), normalized before the cut"
    score = msgspec.structs.replace(found, width=1, truncate_dim=None, normalize=False)
    assert score.describe() == "pooling: MEAN (modules.json), 1 number, not normalized"
    for width, outputs in ((9, None), (1, 2)):  # it is as wide as the vector, or of another output
        found = choose_pooling(PoolingMode.LAST, 8, None, NOTHING, num_outputs=outputs, truncate_dim=width)
        assert (found.width, found.truncate_dim) == (outputs or 8, None)


def test_steps() -> None:
    given = read_overrides({"pooling_type": "STEP", "step_tag_id": 7, "returned_token_ids": [3, 4], "softmax": True})
    found = choose_pooling(PoolingMode.ALL, 8, None, given, num_outputs=5)
    assert (found.step_tag_id, found.returned_token_ids, found.width, found.softmax) == (7, (3, 4), 2, True)
    with pytest.raises(ConfigError, match="step_tag_id"):
        choose_pooling(PoolingMode.ALL, 8, None, read_overrides({"step_tag_id": 7}))


@pytest.mark.parametrize(
    ("values", "num_outputs", "words"),
    [
        ({"returned_token_ids": [0, 2]}, 2, r"returned_token_ids \[0, 2\] are not some of the 2 outputs"),
        ({"returned_token_ids": []}, 2, "returned_token_ids"),
        ({"returned_token_ids": [0]}, None, "returned_token_ids is for scores and classes"),
        ({"softmax": True}, None, "softmax is for scores and classes"),
        ({"normalize": True}, 2, "normalize is for vectors"),
        ({"pooling_type": "STEP", "step_tag_id": 50}, 2, "step_tag_id 50 is outside the vocabulary of 50"),
    ],
)
def test_the_flag_fits_the_model(values: dict[str, object], num_outputs: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^--override-pooler-config: {words}"):
        choose_pooling(PoolingMode.LAST, 8, None, read_overrides(values), num_outputs=num_outputs, vocab_size=50)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pooling_type": "median"}, "'median' is not one of CLS, LAST, MEAN, ALL, STEP"),
        ({"pooling": "CLS"}, "'pooling' is not one of"),
        ({"normalize": 3}, "normalize"),
        ({"returned_token_ids": [-1]}, "returned_token_ids -1"),
        ({"step_tag_id": -2}, "step_tag_id -2"),
    ],
)
def test_refuses_the_flag(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        read_overrides(values)
    assert "--override-pooler-config" in str(error.value)


def test_folder_that_does_not_fit_the_model() -> None:
    with pytest.raises(ConfigError, match=r"8 numbers, config\.json means 16"):
        choose_pooling(PoolingMode.LAST, 16, _folder(), NOTHING)
    joined = PoolingModule(modes=(PoolingMode.MEAN, PoolingMode.CLS), width=4)
    with pytest.raises(ConfigError, match="makes 4 numbers, and the dense layer of the folder reads 8"):
        choose_pooling(PoolingMode.LAST, 4, _folder(DENSE, pooling=joined), read_overrides({"pooling_type": "CLS"}))


def test_folder_without_a_pooling() -> None:
    """Those of classifiers have none."""
    with pytest.raises(ConfigError, match="lists no Pooling"):
        choose_pooling(PoolingMode.LAST, 8, SentenceModules(), NOTHING)
    found = choose_pooling(PoolingMode.LAST, 8, SentenceModules(), NOTHING, num_outputs=3)
    assert (found.modes, found.normalize, found.width) == ((PoolingMode.LAST,), False, 3)


def test_dimensions() -> None:
    assert dimensions_problem(8, 8, {}) is None
    assert dimensions_problem(4, 8, {"is_matryoshka": True}) is None
    assert dimensions_problem(4, 8, {"matryoshka_dimensions": [4]}) is None
    assert "those the model is trained for: 4" in (dimensions_problem(5, 8, {"matryoshka_dimensions": [4]}) or "")
    assert "between 1 and" in (dimensions_problem(9, 8, {"is_matryoshka": True}) or "")
    assert "is_matryoshka" in (dimensions_problem(4, 8, {}) or "")


@pytest.mark.parametrize(
    ("config", "labels", "expected"),
    [
        ({}, 1, Activation.SIGMOID),
        ({}, 3, Activation.SOFTMAX),
        ({"problem_type": "regression"}, 1, Activation.NONE),
        ({"problem_type": "multi_label_classification"}, 3, Activation.SIGMOID),
        ({"problem_type": "single_label_classification"}, 3, Activation.SOFTMAX),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, 1, Activation.NONE),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, 1, Activation.TANH),
        (
            {"sentence_transformers": {"activation_fn": None}, "sbert_ce_default_activation_function": "torch.nn.Tanh"},
            1,
            Activation.SIGMOID,
        ),
    ],
)
def test_activation(config: dict[str, object], labels: int, expected: Activation) -> None:
    assert choose_activation(config, labels) is expected


@pytest.mark.parametrize(
    ("of_folder", "labels", "expected"),
    [
        ("torch.nn.modules.linear.Identity", 1, Activation.NONE),
        ("torch.nn.modules.activation.Tanh", 3, Activation.TANH),
        ("torch.nn.modules.linear.Identity", 3, Activation.SOFTMAX),
    ],
)
def test_activation_of_a_folder(of_folder: str, labels: int, expected: Activation) -> None:
    assert choose_activation({}, labels, of_folder) is expected


def test_code_of_others_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^config\.json: sbert_ce_default_activation_function 'mine\.Act'"):
        choose_activation({"sbert_ce_default_activation_function": "mine.Act"}, 1)
    with pytest.raises(ConfigError, match=r"^config_sentence_transformers\.json: activation_fn 'mine\.Act'"):
        choose_activation({}, 1, "mine.Act")
    with pytest.raises(ConfigError, match=r"^config\.json: sentence_transformers\.activation_fn 5 is not supported"):
        choose_activation({"sentence_transformers": {"activation_fn": 5}}, 1)


def test_labels() -> None:
    assert num_labels({}) == 2
    assert num_labels({"num_labels": 1}) == 1
    assert num_labels({"id2label": {"0": "a", "1": "b", "2": "c"}}) == 3
