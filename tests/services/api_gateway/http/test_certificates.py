"""TLS of a running server: new certificates, broken ones, and ciphers."""

import asyncio
import os
import ssl
import subprocess
from pathlib import Path

import pytest

from blockyard.services.api_gateway import server
from blockyard.services.api_gateway.http.certificates import Certificates, tls_context
from blockyard.shared.config.services.gateway import TlsConfig
from blockyard.shared.errors import ConfigError


def write_certificate(folder: Path, name: str) -> TlsConfig:
    """Writes files `cert` and `key` in the folder, for a host of this name."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    subprocess.run([*command, "-keyout", "key", "-out", "cert"], cwd=folder, check=True, capture_output=True)
    return TlsConfig(certfile=str(folder / "cert"), keyfile=str(folder / "key"), refresh=True)


async def name_of(port: int) -> str:
    """The name in the certificate that a new connection gets."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    words = ["openssl", "x509", "-inform", "der", "-noout", "-subject"]
    shown = subprocess.run(words, input=found, capture_output=True, check=True).stdout.decode()
    return shown.rpartition("=")[2].strip()


async def test_new_connections_get_the_new_certificate_and_a_broken_one_changes_nothing(
    rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "CERTIFICATES_S", 0.02)
    async with rig(tls=write_certificate(tmp_path, "old.test")) as r:
        refreshing = asyncio.create_task(r.server.refresh_certificates())
        await asyncio.sleep(0)
        assert await name_of(r.port) == "old.test"
        (tmp_path / "cert").write_text("-----BEGIN CERTIFICATE-----\nbroken")
        await r.until(lambda: "the certificate stays as it is" in caplog.text)
        assert await name_of(r.port) == "old.test"
        assert len(caplog.records) == 1, "one line, not one for each look"
        (tmp_path / "other").mkdir()
        write_certificate(tmp_path / "other", "new.test")
        os.replace(tmp_path / "other" / "key", tmp_path / "key")
        os.replace(tmp_path / "other" / "cert", tmp_path / "cert")
        async with asyncio.timeout(10):
            while await name_of(r.port) != "new.test":
                await asyncio.sleep(0.02)
        refreshing.cancel()


async def test_without_the_flag_no_file_is_looked_at(rig, tmp_path: Path) -> None:
    tls = write_certificate(tmp_path, "old.test")
    async with rig(tls=TlsConfig(certfile=tls.certfile, keyfile=tls.keyfile)) as r:
        async with asyncio.timeout(1):
            await r.server.refresh_certificates()


def test_files_that_vanish_are_one_change(tmp_path: Path) -> None:
    tls = write_certificate(tmp_path, "old.test")
    certificates = Certificates(tls)
    assert certificates.changed() is None
    (tmp_path / "key").rename(tmp_path / "gone")
    assert certificates.changed() is None
    (tmp_path / "gone").rename(tmp_path / "key")
    assert certificates.changed() is not None
    assert certificates.changed() is None


def test_ciphers_are_those_of_the_flag(tmp_path: Path) -> None:
    tls = write_certificate(tmp_path, "old.test")

    def older(ciphers: str) -> list[str]:
        context = tls_context(TlsConfig(certfile=tls.certfile, keyfile=tls.keyfile, ciphers=ciphers))
        return [each["name"] for each in context.get_ciphers() if each["protocol"] == "TLSv1.2"]

    assert older("ECDHE-RSA-AES256-GCM-SHA384") == ["ECDHE-RSA-AES256-GCM-SHA384"]
    assert len(older("")) > 1
    with pytest.raises(ConfigError, match="--ssl-ciphers nonsense: OpenSSL has none of these"):
        older("nonsense")
