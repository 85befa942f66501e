"""The APIs that this server speaks: a new one is a line here."""

from blockyard.services.api_gateway.apis.chat import CHAT
from blockyard.services.api_gateway.apis.completions import COMPLETIONS
from blockyard.services.api_gateway.apis.interface import Api
from blockyard.services.api_gateway.apis.messages.api import COUNT_TOKENS, MESSAGES
from blockyard.services.api_gateway.apis.responses.api import INPUT_TOKENS, RESPONSES
from blockyard.services.api_gateway.apis.tokens.api import TOKENS

ALL = (CHAT, COMPLETIONS, RESPONSES, INPUT_TOKENS, MESSAGES, COUNT_TOKENS, TOKENS)
APIS: dict[str, Api] = {api.name: api for api in ALL}
