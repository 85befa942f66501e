"""Names of tensors in checkpoints: what releases of one model put before them, or leave out."""

# what checkpoints put before, or leave out of, the names of a model's weights
PREFIXES = ("", "model.", "transformer.", "gpt_neox.", "bert.", "roberta.")
TEXT_PART = "language_model."  # of a model that also sees or hears


def bare(name: str) -> str:
    """Returns the name without the prefixes that differ between checkpoints of one model."""
    name = name.removeprefix("model.").removeprefix(TEXT_PART)
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name
