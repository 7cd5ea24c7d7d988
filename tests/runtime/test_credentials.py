"""Keys: what is accepted, what is found wrong at start, how they are rotated, who may be whom."""

from __future__ import annotations

import builtins
import os
import ssl
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tests.runtime.keys import BOTH, Authority, own_address
from tests.runtime.node import Node, right, until

from pushkv.core.errors import ConfigurationError, MissingDependencyError
from pushkv.core.ids import EngineId, seconds
from pushkv.core.messages import Reason
from pushkv.runtime import Certificates, RuntimeConfig, SharedSecret
from pushkv.runtime.credentials import Tls, engines_named
from pushkv.runtime.secret import issue
from pushkv.testing.reference_engine import ReferenceCache
from pushkv_memory import MemoryFabric

P, D = EngineId("P"), EngineId("D")
PROMPT = tuple(range(40))
SECRET = "0123456789abcdef" * 4
IMPATIENT = {"waiting": seconds(0.6)}


def secret(folder: Path, *secrets: str) -> SharedSecret:
    path = folder / f"secret-{len(list(folder.iterdir()))}"
    path.write_text("\n".join(secrets or (SECRET,)) + "\n")
    return SharedSecret(path)


def shake(server: Tls, client: Tls) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each end sees of the other; ssl.SSLError where one of them refuses."""
    return handshake(server.server(), client.client())


def handshake(
    server: ssl.SSLContext, client: ssl.SSLContext
) -> tuple[dict[str, Any], dict[str, Any]]:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert ends[0].version() == ends[1].version() == "TLSv1.3"
    found = (ends[0].getpeercert(), ends[1].getpeercert())
    assert found[0] is not None
    assert found[1] is not None
    return found[0], found[1]


# -- a shared secret


def test_whoever_knows_the_secret_is_let_in_and_nobody_else(tmp_path: Path) -> None:
    ours, theirs = Tls(secret(tmp_path), P), Tls(secret(tmp_path), D)
    shake(ours, theirs)
    shake(theirs, ours)
    stranger = Tls(secret(tmp_path, SECRET.upper()), P)
    with pytest.raises(ssl.SSLError, match="verify failed"):
        shake(stranger, theirs)
    with pytest.raises(ssl.SSLError, match="verify failed"):
        shake(ours, stranger)


def test_the_authority_is_the_same_wherever_the_secret_is_known_and_keys_are_not() -> None:
    one, other = issue([SECRET.encode()]), issue([SECRET.encode()])
    assert one.authorities == other.authorities
    assert one.key != other.key
    assert issue([b"x" + SECRET.encode()]).authorities != one.authorities


def test_keys_touch_no_disk_and_leave_no_descriptor(tmp_path: Path) -> None:
    Tls(secret(tmp_path), P)
    before = len(os.listdir("/proc/self/fd"))
    made = issue([SECRET.encode()])
    with made.files() as (certificate, key):
        assert key.read_bytes() == made.key
        assert certificate.resolve().as_posix().startswith("/memfd:")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "1 to 8 secrets"),
        ("\n \n", "1 to 8 secrets"),
        ("short\n", "at least 32"),
        (SECRET + "\n" + "b" * 31, "secret 2 of 31 characters"),
        ("\n".join([SECRET] * 9), "1 to 8 secrets"),
        (b"\xff\xfe" * 40, "readable"),
    ],
)
def test_a_bad_secret_is_found_at_start_and_not_shown(
    tmp_path: Path, content: str | bytes, expected: str
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigurationError, match=expected) as error:
        Tls(SharedSecret(path), P)
    assert SECRET not in str(error.value)
    with pytest.raises(ConfigurationError, match="readable file"):
        Tls(SharedSecret(tmp_path / "nowhere"), P)


def test_secrets_are_rotated_without_a_restart(tmp_path: Path) -> None:
    new = "f" * 64
    files = [secret(tmp_path), secret(tmp_path)]
    ends = [Tls(each, P) for each in files]
    for lines in ((SECRET, new), (new, SECRET), (new,)):
        for each in files:  # one after the other: in between they differ
            each.path.write_text("\n".join(lines))
            shake(*ends)
            shake(*reversed(ends))
    with pytest.raises(ssl.SSLError):
        shake(ends[0], Tls(secret(tmp_path), D))


def test_a_file_that_is_broken_later_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = Tls(secret(tmp_path), D)
    ours = secret(tmp_path)
    end = Tls(ours, P)
    ours.path.write_text("short")
    shake(end, theirs)
    shake(end, theirs)
    ours.path.unlink()
    shake(end, theirs)
    assert sum("keeps its old keys" in each for each in caplog.messages) == 2


def test_without_cryptography_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependencyError, match=r"pushkv\[tls\]"):
        Tls(secret(tmp_path), P)


# -- certificates of the user's own


def test_certificates_of_one_authority_accept_each_other(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    ours, theirs = Tls(authority.sign("p"), P), Tls(authority.sign("d"), D)
    shake(ours, theirs)
    stranger = Tls(other.sign("s"), P)
    with pytest.raises(ssl.SSLError, match="verify failed"):
        shake(ours, stranger)
    with pytest.raises(ssl.SSLError, match="verify failed"):
        shake(stranger, ours)


def test_a_peer_with_a_right_certificate_and_an_old_version_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    end, files = Tls(authority.sign("p"), P), authority.sign("d")
    for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        old = ssl.SSLContext(side)
        old.check_hostname = False
        old.verify_mode = ssl.CERT_REQUIRED
        old.load_verify_locations(files.authority)
        old.load_cert_chain(files.certificate, files.key)
        ends = (end.server(), old) if side == ssl.PROTOCOL_TLS_CLIENT else (old, end.client())
        handshake(*ends)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError, match=r"(?i)version|protocol"):
            handshake(*ends)


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_old_versions_and_peers_without_certificate_are_refused(
    tmp_path: Path, newest: ssl.TLSVersion
) -> None:
    end = Tls(Authority(tmp_path).sign("p"), P)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.verify_mode = ssl.CERT_NONE
    bare.maximum_version = newest
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate|version|protocol"):
        handshake(end.server(), bare)


def test_what_no_peer_would_accept_is_found_at_start(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    fine = authority.sign("fine")
    lone_usage = authority.sign("server", usages=BOTH[:1])
    wrong: dict[str, Certificates] = {
        "signed": evolve(fine, authority=other.path),
        "for servers and for clients": lone_usage,
        "expired": authority.sign("old", days=-1),
        "key": evolve(fine, key=authority.sign("another").key),
        "in PEM": authority.sign("locked", password=b"secret"),
        "readable PEM": evolve(fine, key=tmp_path / "nowhere"),
        "readable PEM file": evolve(fine, authority=tmp_path / "nowhere"),
        "certificates in PEM": evolve(fine, authority=fine.key),
    }
    for expected, credentials in wrong.items():
        with pytest.raises(ConfigurationError, match=f"(?s){expected}"):
            Tls(credentials, P)


def test_certificates_say_which_engines_their_holder_may_be(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ours = Tls(authority.sign("p", ("P", "P2")), P)
    theirs = Tls(authority.sign("d", ("D%20one",)), EngineId("D one"))
    unnamed = Tls(authority.sign("any"), EngineId("anything"))
    seen, _ = shake(theirs, ours)
    assert engines_named(seen) == {"D one"}
    assert ours.may_be(EngineId("D one"), engines_named(seen))
    assert not ours.may_be(P, engines_named(seen))
    seen, _ = shake(unnamed, ours)
    assert engines_named(seen) == frozenset()
    assert not ours.may_be(P, engines_named(seen)), "ours names engines: so must theirs"
    assert unnamed.may_be(P, engines_named(seen))
    assert not unnamed.may_be(P, frozenset({D})), "whom a certificate names it names alone"
    with pytest.raises(ConfigurationError, match="engine = 'D'"):
        Tls(authority.sign("q", ("P",)), D)


# -- two runtimes


def pair(tmp_path: Path, kind: str) -> tuple[Any, Any]:
    if kind == "secret":
        return secret(tmp_path), secret(tmp_path)
    authority = Authority(tmp_path)
    names = (("P",), ("D",)) if kind == "named" else ((), ())
    return authority.sign("p", names[0]), authority.sign("d", names[1])


@pytest.mark.parametrize("kind", ["secret", "named", "unnamed"])
def test_engines_that_trust_each_other_transfer(tmp_path: Path, kind: str) -> None:
    host = own_address()
    if host is None:
        pytest.skip("this machine has no address but loopback")
    ours, theirs = pair(tmp_path, kind)
    fabric = MemoryFabric()
    with (
        Node(fabric, "P", credentials=ours, listen_host=host) as producer,
        Node(fabric, "D", credentials=theirs, listen_host=host) as consumer,
    ):
        assert producer.address.host == host
        producer.produce("t", PROMPT)
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert (generation.reason, generation.tokens) == (None, right(PROMPT))
        assert not generation.prefilled


def test_who_claims_another_name_is_refused_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    fabric = MemoryFabric()
    with (
        Node(fabric, "P", credentials=authority.sign("p", ("P",))) as producer,
        Node(fabric, "D", credentials=authority.sign("d", ("D", "E"))) as consumer,
    ):
        with Node(
            fabric, "E", credentials=authority.sign("e", ("E",)), changes=IMPATIENT
        ) as impostor:
            _rename(impostor, D)
            generation = impostor.consume("t", PROMPT, producer.address).result(10)
            assert generation.reason in (Reason.LINK_LOST, Reason.WAITED, Reason.UNREACHABLE)
            until(lambda: producer.runtime.counters["wrong_identity"])
            until(lambda: impostor.runtime.counters["refused_by_peer"])
        assert any("D, with a certificate that names E" in each for each in caplog.messages)
        producer.produce("u", PROMPT)
        generation = consumer.consume("u", PROMPT, producer.address).result(10)
        assert (generation.reason, generation.tokens) == (None, right(PROMPT))


def _rename(node: Node, name: EngineId) -> None:
    """What it says in HELLO from now on, whatever its certificate says."""
    endpoint = _endpoint(node)
    endpoint.links._hello = evolve(endpoint.links._hello, engine=name)


def _endpoint(node: Node) -> Any:
    import gc

    from pushkv.runtime.loop import Loop

    return next(
        each._endpoint
        for each in gc.get_objects()
        if isinstance(each, Loop) and each._bridge is node.runtime.bridge
    )


@pytest.mark.parametrize("mine", ["another secret", "plaintext"])
def test_a_consumer_that_is_not_trusted_gets_no_block_and_tells_no_key(
    tmp_path: Path, mine: str, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = MemoryFabric()
    other = (
        None if mine == "plaintext" else secret(tmp_path, "another secret, just as long as it is")
    )
    with (
        Node(fabric, "P", credentials=secret(tmp_path)) as producer,
        Node(fabric, "D", credentials=other, changes=IMPATIENT) as consumer,
    ):
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert generation.reason is Reason.UNREACHABLE
        assert generation.tokens == right(PROMPT), "computed by the consumer itself"
        until(lambda: producer.runtime.counters["tls_failed"])
        assert sum("tls_failed (1 so far)" in each for each in caplog.messages) == 1
        assert consumer.free == 24, "nothing was offered to anybody"
        assert fabric.history == ()


def test_plaintext_dials_nobody_on_another_machine(caplog: pytest.LogCaptureFixture) -> None:
    host = own_address()
    if host is None:
        pytest.skip("this machine has no address but loopback")
    fabric = MemoryFabric()
    with (
        Node(fabric, "P", plaintext=True, listen_host=host) as producer,
        Node(fabric, "D", changes=IMPATIENT) as consumer,
    ):
        assert sum("is plaintext: whoever reaches it" in each for each in caplog.messages) == 1
        generation = consumer.consume("t", PROMPT, producer.address).result(10)
        assert generation.reason is Reason.UNREACHABLE
        assert consumer.runtime.counters["plaintext_refused"]
        assert consumer.free == 24
    with (
        Node(fabric, "P", plaintext=True, listen_host=host) as producer,
        Node(fabric, "D", plaintext=True) as consumer,
    ):
        producer.produce("u", PROMPT)
        assert consumer.consume("u", PROMPT, producer.address).result(10).reason is None


def test_settings_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    layout = ReferenceCache(layers=1, block_count=1).layout
    with pytest.raises(ConfigurationError, match="credentials"):
        RuntimeConfig(P, layout, listen_host="192.0.2.7")
    with pytest.raises(ConfigurationError, match="plaintext = True"):
        RuntimeConfig(P, layout, plaintext=True, credentials=secret(tmp_path))
    RuntimeConfig(P, layout, listen_host="192.0.2.7", credentials=secret(tmp_path))
