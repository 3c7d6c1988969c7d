"""TLS: the coordinator and the sidecars' `/metrics` serve with a certificate, and callers trust one authority.

Without an authority (HOLTER_TLS_CA) callers trust exactly this certificate, under whatever name its host is reached: a
certificate seldom names all hosts of a cluster. With an authority, the name must be in the certificate, too.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

SCHEME = "https://"
"""Beginning of a TLS server's address; a mere `host:port` is in the clear."""


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files; all empty: no TLS."""

    certificate: str = ""
    """The certificate, with the chain that leads to its authority, if there is one."""
    key: str = ""
    ca: str = ""

    @property
    def is_on(self) -> bool:
        """Whether a coordinator that is started here serves with TLS."""
        return bool(self.certificate)

    def server(self) -> "ssl.SSLContext | None":
        """Return the context for serving; None: in the clear. Raises OSError (ssl.SSLError among them)."""
        import ssl  # noqa: PLC0415 - most runs need none

        if not self.is_on:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        return context

    def client(self) -> "ssl.SSLContext":
        """Return the context for calling. Raises OSError (ssl.SSLError among them)."""
        import ssl  # noqa: PLC0415 - most runs need none

        context = ssl.create_default_context(cafile=self.ca or self.certificate or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.certificate and not self.ca:
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    def problem(self) -> str | None:
        """Return why these files cannot be used; None if they can."""
        try:
            self.server()
            self.client()
        except OSError as error:
            named = ", ".join(filter(None, (self.certificate, self.key, self.ca)))
            return f"TLS cannot be used with {named}: {error.strerror or error}"
        return None


NO_TLS = TlsFiles()
