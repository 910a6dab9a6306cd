"""Certificates of the servers on 127.0.0.1, signed by an authority made for the occasion."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """Files of a server: its key, its certificate, and the authority's certificate for clients."""

    key: Path
    certificate: Path
    authority: Path

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


def make_identity(folder: Path, name: str) -> ServerIdentity:
    """Write the three files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name}-ca")])
    key_id = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    signs = dict.fromkeys(_USAGES, False) | {"key_cert_sign": True, "crl_sign": True}
    authority = (
        _builder(issuer, issuer, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**signs), critical=True)
        .add_extension(key_id, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        _builder(subject, issuer, server_key)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=False)
        .add_extension(issued_by, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    files = ServerIdentity(folder / "tls.key", folder / "tls.crt", folder / "ca.crt")
    pem = serialization.Encoding.PEM
    files.key.write_bytes(
        server_key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    files.certificate.write_bytes(certificate.public_bytes(pem))
    files.authority.write_bytes(authority.public_bytes(pem))
    return files


_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
    )
