"""Options, parameters and identities: what users and clients write, right and wrong."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import fields
from hypothesis import given
from hypothesis import strategies as st

from pushkv.core.errors import ConfigurationError, RemoteProtocolError
from pushkv.core.ids import seconds
from pushkv.core.policy import Policy
from pushkv.runtime import Certificates, SharedSecret
from pushkv_vllm.config import Options, read_options
from pushkv_vllm.identity import RequestName, prompt_digest, read_name, transfer_id
from pushkv_vllm.params import ConsumerLeg, ProducerLeg, read_params

# -- options


def test_no_options_is_the_defaults() -> None:
    assert read_options({}) == Options()


def test_durations_are_seconds_and_counts_are_counts() -> None:
    options = read_options({"lease_s": 4, "hold_s": 12.5, "attempts": 5, "transport": "memory"})
    assert options.policy == Policy(lease=seconds(4), hold=seconds(12.5), attempts=5)
    assert options.transport == "memory"


def test_credentials_are_a_secret_or_three_files() -> None:
    assert read_options({}).credentials is None
    secret = read_options({"shared_secret_path": "/run/secret"}).credentials
    assert secret == SharedSecret(Path("/run/secret"))
    files = {"authority_path": "/a", "certificate_path": "/c", "key_path": "/k"}
    assert read_options(files).credentials == Certificates(Path("/a"), Path("/c"), Path("/k"))
    for wrong, field in (
        ({"authority_path": "/a", "key_path": "/k"}, "certificate_path"),
        ({"certificate_path": "/c"}, "authority_path"),
        ({**files, "shared_secret_path": "/s"}, "shared_secret_path"),
        ({"shared_secret_path": "/s", "plaintext": True}, "plaintext"),
    ):
        with pytest.raises(ConfigurationError) as error:
            read_options(wrong)
        assert error.value.field == field


@pytest.mark.parametrize(
    ("name", "close"),
    [("leese_s", "lease_s"), ("transprot", "transport"), ("lease", "lease_s"), ("ports", "port")],
)
def test_an_unknown_option_is_named_with_its_neighbour(name: str, close: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"kv_connector_extra_config\.{name} .*{close}"):
        read_options({name: 1})


def test_an_option_like_no_other_lists_them_all() -> None:
    with pytest.raises(ConfigurationError) as error:
        read_options({"zzzzzzzzzz": 1})
    for each in fields(Options):
        assert each.name == "policy" or each.name in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transport", ""),
        ("transport", 3),
        ("transport_options", []),
        ("listen_host", None),
        ("port", 70_000),
        ("while_waiting", "doze"),
        ("while_waiting", True),
        ("port", -1),
        ("port", True),
        ("port", "80"),
        ("plaintext", "yes"),
        ("shared_secret_path", ""),
        ("authority_path", 3),
        ("advertise_push", 1),
        ("exposed_share", 0),
        ("exposed_share", 2),
        ("lease_s", 0),
        ("lease_s", "5"),
        ("lease_s", float("nan")),
        ("attempts", 1.5),
        ("attempts", 0),
        ("waiting_s", 0.5),
        ("weights_epoch", {}),
    ],
)
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as error:
        read_options({name: value})
    field = error.value.field
    assert field in (name, name.removesuffix("_s"), "resend", "query")


def test_the_budget_is_a_share_of_the_pool() -> None:
    assert read_options({"exposed_share": 0.25}).exposed_blocks(1_000) == 250
    assert read_options({}).exposed_blocks(1) == 1


# -- parameters

DECODE = {
    "do_remote_prefill": True,
    "remote_host": "p.example",
    "remote_port": 4_711,
    "transfer_id": "t",
}


def test_no_parameters_is_no_transfer() -> None:
    assert read_params(None) is None
    assert read_params({}) is None
    assert read_params({"do_remote_prefill": False, "do_remote_decode": None}) is None


def test_the_legs_are_read() -> None:
    nulls = dict.fromkeys(("remote_engine_id", "remote_host", "remote_port", "remote_block_ids"))
    assert read_params({"do_remote_decode": True, **nulls}) == ProducerLeg(None)
    assert read_params(DECODE) == ConsumerLeg("p.example", 4_711, "", "t", None)
    more = {"remote_port": "4711", "remote_engine_id": "e", "tp_size": 1, "transfer_mode": "push"}
    assert read_params({**DECODE, **more}) == ConsumerLeg("p.example", 4_711, "e", "t", None)


@pytest.mark.parametrize("missing", ["remote_host", "remote_port", "transfer_id"])
def test_a_missing_key_is_named(missing: str) -> None:
    params = {key: value for key, value in DECODE.items() if key != missing}
    with pytest.raises(RemoteProtocolError, match=missing):
        read_params(params)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_remote_prefill", "true"),
        ("do_remote_decode", True),
        ("do_remote_decode", 1),
        ("remote_host", 7),
        ("remote_host", ""),
        ("remote_host", "a\nb"),
        ("remote_host", "h" * 254),
        ("remote_port", 0),
        ("remote_port", 65_536),
        ("remote_port", True),
        ("remote_port", "\uff18\uff10"),
        ("remote_port", "port"),
        ("remote_port", 4_711.0),
        ("transfer_id", ["t"]),
        ("transfer_id", "t" * 401),
        ("remote_request_id", {}),
        ("remote_engine_id", 5),
        ("tp_size", 0),
        ("tp_size", True),
        ("tp_size", "1"),
        ("dcp_size", 2),
        ("pp_size", [1]),
    ],
)
def test_a_wrong_key_is_named(key: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError) as error:
        read_params({**DECODE, key: value})
    assert error.value.field in (key, "do_remote_prefill")
    assert len(str(error.value)) < 300


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_a_value_that_cannot_be_shown_is_refused_all_the_same() -> None:
    with pytest.raises(RemoteProtocolError, match="Hostile"):
        read_params({**DECODE, "remote_host": Hostile()})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    (
        "do_remote_prefill",
        "do_remote_decode",
        "remote_host",
        "remote_port",
        "remote_engine_id",
        "transfer_id",
        "remote_request_id",
        "tp_size",
        "pp_size",
        "other",
    )
)


@given(JSON | st.dictionaries(KEYS, JSON | st.just(True)))
def test_nothing_but_the_one_error_comes_out(params: object) -> None:
    with suppress(RemoteProtocolError):
        leg = read_params(params)
        assert leg is None or isinstance(leg, ProducerLeg | ConsumerLeg)


# -- identities


@pytest.mark.parametrize(
    ("request_id", "name"),
    [
        ("cmpl-abc-0-0123abcd", RequestName("abc")),
        ("cmpl-abc-2-0123abcd", RequestName("abc", 2)),
        ("1_cmpl-abc-0-0123abcd", RequestName("abc", 0, 1)),
        ("chatcmpl-abc-0123abcd", RequestName("abc")),
        ("chatcmpl-abc_1-0123abcd", RequestName("abc_1")),
        ("3_chatcmpl-a-b-c-0123abcd", RequestName("a-b-c", 0, 3)),
        (
            "cmpl-550e8400-e29b-41d4-a716-446655440000-0-0123abcd",
            RequestName("550e8400-e29b-41d4-a716-446655440000"),
        ),
        ("cmpl-x-0-deadbeef-0-0123abcd", RequestName("x-0-deadbeef")),
        ("plain-0123abcd", RequestName("plain")),
        ("plain", RequestName("plain")),
    ],
)
def test_a_request_id_is_taken_apart(request_id: str, name: RequestName) -> None:
    assert read_name(request_id) == name


def test_without_random_digits_nothing_is_taken_for_them() -> None:
    assert read_name("cmpl-deadbeef-0", randomized=False) == RequestName("deadbeef")
    assert read_name("chatcmpl-x-deadbeef", randomized=False) == RequestName("x-deadbeef")


@given(st.text(), st.booleans())
def test_any_request_id_has_a_name(request_id: str, randomized: bool) -> None:
    assert read_name(request_id, randomized=randomized).sample >= 0


def test_a_transfer_id_that_is_given_is_kept() -> None:
    assert transfer_id("t", RequestName("x"), b"d") == "t"
    assert transfer_id("t", RequestName("x", 1, 2), b"d") == "t/1.2"


def test_a_derived_transfer_id_depends_on_all_it_is_made_of() -> None:
    ids = {
        transfer_id(None, name, digest)
        for name in (
            RequestName("x"),
            RequestName("y"),
            RequestName("x", 1),
            RequestName("x", 0, 1),
        )
        for digest in (b"1", b"2")
    }
    assert len(ids) == 8
    assert transfer_id(None, RequestName("x"), b"1") in ids
    assert all(len(each) < 100 for each in ids)


def prompt(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "prompt_token_ids": [1, 2, 3],
        "prompt_embeds": None,
        "lora_request": None,
        "mm_features": [],
        "cache_salt": None,
    }
    return SimpleNamespace(**{**values, **changes})


def image(name: str, offset: int = 0) -> Any:
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=4))


def test_a_prompt_digest_covers_all_that_the_cache_depends_on() -> None:
    lora = SimpleNamespace(lora_name="l", lora_path="/l")
    other = SimpleNamespace(lora_name="l", lora_path="/m")
    prompts = [
        prompt(),
        prompt(prompt_token_ids=[1, 2]),
        prompt(prompt_token_ids=[1, 2, 4]),
        prompt(prompt_token_ids=[3, 2, 1]),
        prompt(prompt_token_ids=None),
        prompt(lora_request=lora),
        prompt(lora_request=other),
        prompt(mm_features=[image("i")]),
        prompt(mm_features=[image("j")]),
        prompt(mm_features=[image("i", 1)]),
        prompt(mm_features=[image("i"), image("i")]),
        prompt(cache_salt="s"),
    ]
    digests = [prompt_digest(each) for each in prompts]
    assert len(set(digests)) == len(prompts)
    assert prompt_digest(prompt()) == digests[0]


@pytest.mark.vllm
def test_a_prompt_digest_covers_embeddings() -> None:
    torch = pytest.importorskip("torch")
    first, second = torch.zeros(3, 4), torch.ones(3, 4)
    assert prompt_digest(prompt(prompt_embeds=first)) != prompt_digest(prompt(prompt_embeds=second))
    assert prompt_digest(prompt(prompt_embeds=first)) == prompt_digest(
        prompt(prompt_embeds=torch.zeros(4, 3).T)
    )
