"""Renders a query and a document to one prompt, for rerankers that are language models."""

from collections.abc import Mapping

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from blockyard.services.tokenizer_pool.chats.chat_template import RENDER_ERRORS
from blockyard.services.tokenizer_pool.chats.sandbox import Sandbox
from blockyard.shared.config.services.tokenizer import MessageSettings
from blockyard.shared.errors import ConfigError, RequestError


class PairTemplate:
    """A template with `query`, `document` and `instruction`, or with messages of these roles."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        settings: MessageSettings | None = None,
    ) -> None:
        """special_tokens: by their names in templates, such as `bos_token`. Raises ConfigError for a template that does
        not compile, or that leaves a text out."""
        settings = settings or MessageSettings()
        self._values = {"add_generation_prompt": False, **(special_tokens or {}), **settings.values}
        self._has_parts = settings.has_parts
        try:
            self._template = Sandbox().from_string(source)
        except TemplateSyntaxError as e:
            raise ConfigError(f"the template of pairs is wrong in line {e.lineno}: {e.message}") from e
        except (TemplateError, RuntimeError, SyntaxError, TypeError, ValueError) as e:
            raise ConfigError(f"the template of pairs does not compile: {e}") from e
        self._check()

    def render(self, query: str, document: str, instruction: str | None) -> str:
        """Raises RequestError for what the template refuses."""
        roles = [("system", instruction), ("query", query), ("document", document)]
        messages = [{"role": role, "content": self._content(text)} for role, text in roles if text is not None]
        texts = {"query": query, "document": document, "instruction": instruction}
        try:
            return self._template.render({**self._values, **texts, "messages": messages})
        except RENDER_ERRORS as e:
            raise RequestError(str(e) or repr(e), "input") from e

    def _check(self) -> None:
        """Raises ConfigError if one of the texts makes no difference, as with templates of chats alone."""
        try:
            written = self.render("a", "b", None)
            others = {"query": self.render("c", "b", None), "document": self.render("a", "c", None)}
        except RequestError:
            return  # such as one that needs an instruction: requests say so
        for name, other in others.items():
            if other == written:
                raise ConfigError(f"the template of pairs does not show the {name}: it needs `{name}`, or that role")

    def _content(self, text: str) -> str | list[dict[str, str]]:
        return [{"type": "text", "text": text}] if self._has_parts else text
