"""The HTTP servers around a gateway, from the first listening socket to the last drained request."""

import asyncio
import logging
import ssl

from aiohttp import web

from blockyard.services.api_gateway.routes import build_app, build_metrics_app
from blockyard.services.api_gateway.service import Gateway
from blockyard.shared.config.gateway import GatewayConfig, TlsConfig
from blockyard.shared.errors import ConfigError

log = logging.getLogger(__name__)

BACKLOG = 1024
POLL_S = 0.05
