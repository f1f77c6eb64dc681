"""Keys and certificates for servers on this machine, for as long as a test."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID


def self_signed(certificate: Path, key: Path) -> bytes:
    """For 127.0.0.1 and localhost; whoever is to trust it gets the certificate itself, which is returned."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    pem = signed.public_bytes(serialization.Encoding.PEM)
    certificate.write_bytes(pem)
    _write(private, key)
    return pem


def key_pair(path: Path) -> None:
    """For tokens that are signed (RSA: what Kubernetes signs service accounts' with)."""
    _write(rsa.generate_private_key(public_exponent=65537, key_size=2048), path)


def _write(private: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, path: Path) -> None:
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.TraditionalOpenSSL
    path.write_bytes(private.private_bytes(serialization.Encoding.PEM, form, plain))
    path.chmod(0o600)
