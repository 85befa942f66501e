"""Writes each text of a pooling model as a message of the chat template, as sentence-transformers does."""

from blockyard.services.tokenizer_pool.chats.chat_messages import Message
from blockyard.services.tokenizer_pool.chats.chat_template import Chat, ChatTemplates
from blockyard.shared.config.services.tokenizer import MessageSettings


class TextTemplate:
    """The model's chat template, for texts that are no chats."""

    def __init__(self, templates: ChatTemplates, settings: MessageSettings) -> None:
        self._templates, self._settings = templates, settings

    def render(self, text: str, prompt: str) -> str:
        """prompt: the system's message; "": there is none. Raises RequestError for what the template refuses."""
        roles = [("system", prompt), ("user", text)] if prompt else [("user", text)]
        messages: list[Message] = [{"role": role, "content": content} for role, content in roles]
        style = "openai" if self._settings.has_parts else "string"
        values = {"add_generation_prompt": False} | self._settings.values
        return self._templates.render(Chat(messages, [], values, None, False, False, style))
