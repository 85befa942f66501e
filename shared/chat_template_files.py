"""The chat templates of a model's tokenizer folder."""

from pathlib import Path
from typing import Any

from blockyard.shared.errors import LoadError
from blockyard.shared.json_objects import decode_object


def chat_templates(folder: Path) -> dict[str, str]:
    """Returns templates by name: "default", "tool_use", ...

    Template files override the entry of tokenizer_config.json, as in transformers. Raises LoadError.
    """
    templates: dict[str, str] = {}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _text(path)
    if templates:
        return templates
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = json_object(folder / name).get("chat_template")
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, list):
            return {
                str(t["name"]): str(t["template"])
                for t in value
                if isinstance(t, dict) and {"name", "template"} <= t.keys()
            }
        if isinstance(value, dict):
            return {str(name): str(text) for name, text in value.items()}
    return {}


def json_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, or an empty one without the file. Raises LoadError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise LoadError(f"tokenizer: {path}: {e.strerror}") from e
    try:
        return decode_object(data)
    except ValueError as e:
        raise LoadError(f"tokenizer: {path}: {e}") from e


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise LoadError(f"tokenizer: {path}: {e}") from e
