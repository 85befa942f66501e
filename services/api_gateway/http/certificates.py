"""The TLS context of a server, and a new one when its files change: --enable-ssl-refresh."""

import logging
import os
import ssl

from blockyard.shared.config.services.gateway import TlsConfig
from blockyard.shared.errors import ConfigError

log = logging.getLogger(__name__)


class Certificates:
    """Notices changed files. Files that a secret store replaces by links to others count as changed, too."""

    def __init__(self, tls: TlsConfig) -> None:
        self._tls = tls
        self._seen = self._look()

    def changed(self) -> ssl.SSLContext | None:
        """A context if files changed since the last call. None if not, or if they cannot be used: a line says why.

        Files that are being written may look broken; they are read again when they change next.
        """
        found = self._look()
        if found == self._seen:
            return None
        self._seen = found
        try:
            context = tls_context(self._tls)
        except ConfigError as e:
            log.error("the certificate stays as it is: %s", e)
            return None
        log.info("new connections have the certificate that %s holds now", self._tls.certfile)
        return context

    def _look(self) -> list[tuple[int, ...] | None]:
        return [_mark(path) for path in (self._tls.certfile, self._tls.keyfile, self._tls.ca_certs) if path]


def _mark(path: str) -> tuple[int, ...] | None:
    """Differs after each change of a file; None for a file that cannot be read."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def tls_context(tls: TlsConfig) -> ssl.SSLContext:
    """Raises ConfigError if the files or the ciphers cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # an empty password: an encrypted key fails instead of prompting at the terminal
        context.load_cert_chain(tls.certfile, tls.keyfile or None, password="")
        if tls.ca_certs:
            context.load_verify_locations(tls.ca_certs)
        context.verify_mode = ssl.VerifyMode(tls.cert_reqs)
    except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
        key = f"--ssl-keyfile {tls.keyfile}" if tls.keyfile else "no --ssl-keyfile: the file must hold the key too"
        raise ConfigError(f"TLS: {e}; --ssl-certfile {tls.certfile}, {key}") from e
    try:
        if tls.ciphers:
            context.set_ciphers(tls.ciphers)
    except ssl.SSLError as e:
        raise ConfigError(f"--ssl-ciphers {tls.ciphers}: OpenSSL has none of these") from e
    return context
