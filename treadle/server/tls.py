"""The certificate of an HTTPS server."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from treadle.core import TreadleError

log = logging.getLogger("treadle.server")


class Tls:
    """A context for TLS 1.2 and newer with the certificate of two files in PEM format."""

    def __init__(self, certificate: str, key: str | None) -> None:
        """key: None if it is in the file of the certificate. Raises TreadleError naming the file that is
        wrong."""
        self._certificate = certificate
        self._key = key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load()

    def renew(self) -> None:
        """Read the files again, for new connections; what was there goes on if they are wrong."""
        try:
            self._load()
        except TreadleError as error:
            log.error("%s; the certificate stays as it was", error)
        else:
            log.info("the certificate was read again from %s", self._certificate)

    def _load(self) -> None:
        for option, file in (("--tls-cert", self._certificate), ("--tls-key", self._key)):
            if file is not None:
                try:
                    Path(file).open("rb").close()
                except OSError as error:
                    raise TreadleError(f"{option}: cannot read {file}: {error.strerror}") from None
        try:
            trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # a failure leaves one with half of a pair
            trial.load_cert_chain(self._certificate, self._key, self._password)
            self.context.load_cert_chain(self._certificate, self._key, self._password)
        except ssl.SSLError as error:
            key = self._key or "the key in it"
            wrong = (
                f"{key} does not belong to {self._certificate}"
                if error.reason == "KEY_VALUES_MISMATCH"
                else f"{self._certificate} and {key} are no certificate and private key in PEM format"
            )
            raise TreadleError(f"--tls-cert, --tls-key: {wrong} ({error.reason or error})") from None

    def _password(self) -> str:
        raise TreadleError(
            f"--tls-key: {self._key or self._certificate} has a password, which nobody can type when a "
            "service starts; remove it: openssl pkey -in FILE -out NEW_FILE"
        )
