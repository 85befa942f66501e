"""The endpoints of pooling models: a new one is a line here."""

from blockyard.services.api_gateway.apis.pooling.interface import PoolingApi
from blockyard.services.api_gateway.apis.pooling.scores import CLASSIFY, COHERE_RERANK, RERANK, SCORE
from blockyard.services.api_gateway.apis.pooling.vectors import COHERE_EMBED, EMBEDDINGS, POOLING

POOLING_APIS: dict[str, PoolingApi] = {
    api.name: api for api in (EMBEDDINGS, COHERE_EMBED, SCORE, RERANK, COHERE_RERANK, CLASSIFY, POOLING)
}
