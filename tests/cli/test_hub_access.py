"""Variables and networks that keep the hub's client from asking anything: said in one line, without any password."""

from __future__ import annotations

import pytest

from cli.conftest import Cli
from cli.mock_hub import Hub
from sparkchat.errors import UsageError
from sparkchat.hub_access import refuse_unusable, what_to_check, without_password

HUB = "https://hub.example"


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in ("HTTP", "HTTPS", "ALL", "NO"):
        for name in (f"{scheme}_PROXY", f"{scheme.lower()}_proxy"):
            monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("proxy", "words"),
    [
        ("socks5://me:geheim@127.0.0.1:9", "cannot speak with the proxy socks5://127.0.0.1:9; give an http:// proxy"),
        ("http://me:ge/heim@127.0.0.1:9", "the proxy http://127.0.0.1:9 is none that can be used"),
        ("ftp://me:geheim@127.0.0.1:9", "the proxy ftp://127.0.0.1:9 is none that can be used"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_one_line(cli: Cli, no_proxy: None, proxy: str, words: str) -> None:
    done = cli("pull", "hf:org/model", env={"HF_ENDPOINT": "http://hub.example", "ALL_PROXY": proxy})
    assert done.code == 69
    assert words in done.error and "heim" not in done.error


def test_the_proxy_of_all_addresses_is_named(no_proxy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert what_to_check(HUB) == "check the network"
    monkeypatch.setenv("ALL_PROXY", "http://me:geheim@proxy.example:9")
    assert what_to_check(HUB) == "check the network and the proxy http://proxy.example:9"
    monkeypatch.setenv("https_proxy", "me:geheim@other.example:9")
    assert what_to_check(HUB) == "check the network and the proxy other.example:9"
    monkeypatch.setenv("no_proxy", "hub.example")
    assert what_to_check(HUB) == "check the network"


def test_certificates_that_are_not_there_are_named(no_proxy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    assert what_to_check(HUB) == "check the network and SSL_CERT_FILE (/nowhere/ca.pem is not there)"


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://proxy:80", "http://proxy:80"),
        ("http://a:b@c@proxy:80", "http://proxy:80"),
        ("a:b/c@proxy:80", "proxy:80"),
        ("http://a:b://@proxy", "http://proxy"),
    ],
)
def test_no_part_of_a_password_is_shown(address: str, shown: str) -> None:
    assert without_password(address) == shown


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_HUB_DOWNLOAD_TIMEOUT", "abc"),
        ("HF_HUB_ETAG_TIMEOUT", ""),
        ("HF_ENDPOINT", "hub.example"),
        ("HF_ENDPOINT", "http://hub.example:port"),
        ("HF_ENDPOINT", ""),
    ],
)
def test_variables_of_the_hubs_client_are_checked(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is '{value}'; give "):
        refuse_unusable({name: value})
    refuse_unusable({"HF_HUB_DOWNLOAD_TIMEOUT": " 30 ", "HF_ENDPOINT": "http://127.0.0.1:8080/mirror/"})


def test_a_wrong_variable_leaves_stdout_alone_and_stops_no_report(main: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "abc")
    done = main("pull", "hf:org/model")
    assert (done.code, done.out) == (2, "")
    assert "HF_HUB_DOWNLOAD_TIMEOUT is 'abc'" in done.error
    assert "hub: HF_HUB_DOWNLOAD_TIMEOUT is 'abc'" in main("doctor").out


def test_a_login_page_is_no_hub(main: Cli, hub: Hub) -> None:
    hub.repos["org/model"].is_login_page = True
    done = main("pull", "hf:org/model")
    assert (done.code, "is no hub: a login page" in done.error) == (69, True)


def test_a_name_that_no_hub_allows_is_not_found(main: Cli, hub: Hub) -> None:
    done = main("pull", "hf:org/a--b")
    assert (done.code, "allows no name like hf:org/a--b" in done.error) == (3, True)


def test_a_token_that_cannot_be_sent_is_said_and_not_shown(
    main: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_gehe\u00efm")
    done = main("pull", "hf:org/model")
    assert (done.code, "your access token holds characters" in done.error) == (77, True)
    assert "gehe" not in done.error
