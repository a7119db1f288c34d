"""Commands that ask a served model, against one that answers right and wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from served import PAGE, Served

from kvtier.cli import main
from kvtier.integration.probes import client


@pytest.fixture(autouse=True)
def _soon_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "STILL", 0.05)


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as served:
        yield served


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command: its exit status, standard output and standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["kvtier", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capfd.readouterr()
        return int(ended.value.code or 0), " ".join(said.out.split()), " ".join(said.err.split())

    return run


class TestSelfcheck:
    def test_equal_to_the_last_bit(self, served: Served, run) -> None:
        status, text, _ = run("selfcheck", served.url, "--tokens", "640")
        assert status == 0
        # Three prompts, the rest of a page of each but its first token, and the output.
        scored = 3 * (PAGE - 1 - 1 + client.OUTPUT_TOKENS)
        assert f"The same: {scored} log probabilities" in text

    def test_the_last_bit_counts_unless_there_is_a_tolerance(self, served: Served, run) -> None:
        served.wrong = 1e-14
        status, text, _ = run("selfcheck", served.url, "--tokens", "640")
        assert (status, "Different:" in text) == (1, True)
        status, text, _ = run("selfcheck", served.url, "--tokens", "640", "--tolerance", "1e-9")
        assert (status, "The same:" in text) == (0, True)

    def test_another_token_with_the_same_log_probabilities(self, served: Served, run) -> None:
        served.other_last_token = True
        status, text, _ = run("selfcheck", served.url, "--tokens", "640")
        assert (status, "Different:" in text) == (1, True)

    def test_json(self, served: Served, run) -> None:
        served.wrong = 0.5
        status, text, _ = run("selfcheck", served.url, "--tokens", "640", "--json")
        found = json.loads(text)
        assert (status, found["same"]) == (1, False)
        for prompt in found["prompts"]:
            assert prompt["difference_to_device"] == pytest.approx(0.5)
            assert prompt["device_to_itself"] == 0
            assert prompt["restored"]["storage"] == 640

    @pytest.mark.parametrize(
        ("knob", "value", "said"),
        [
            ("cached_from_start", 64, "64 tokens of a prompt that no server has seen came"),
            ("stored", 0.0, "Nothing came from the store"),
            ("stored", 0.5, "320 of 640 tokens came from the store"),
            ("flushes", False, "640 tokens were still in the caches"),
            ("noise", 1e-6, "twice, is 1e-06 apart"),
            ("metrics", "up 1.0\n", "--enable-metrics"),
            ("missing", {"/metrics"}, "--enable-metrics"),
            ("missing", {"/server_info"}, "has no /server_info"),
            ("key", "secret", "SGLANG_API_KEY"),
            ("admin_key", "secret", "--admin-api-key"),
            ("backend", None, "The server's storage is off"),
            ("longest_prompt", 99, "give --tokens below 28"),
        ],
    )
    def test_what_cannot_be_told_is_said(self, served: Served, run, knob, value, said) -> None:
        setattr(served, knob, value)
        status, text, error = run("selfcheck", served.url, "--tokens", "640")
        assert (status, text) == (2, "")
        assert said in error
        assert "secret" not in error and "Traceback" not in error

    def test_answers_that_do_not_depend_on_the_pages_prove_nothing(self, served, run) -> None:
        served.deaf = True
        status, _, error = run("selfcheck", served.url, "--tokens", "640")
        assert status == 2 and "cannot tell a wrong page" in error

    def test_keys_are_sent_and_not_shown(self, served: Served, run, monkeypatch) -> None:
        served.key, served.admin_key = "secret", "more secret"
        monkeypatch.setenv("SGLANG_API_KEY", "secret")
        status, text, error = run(
            "selfcheck", served.url, "--tokens", "640", "--admin-api-key", "more secret"
        )
        assert status == 0 and "secret" not in text + error


def test_nobody_there(run) -> None:
    status, _, error = run("selfcheck", "http://127.0.0.1:9")
    assert status == 2 and "Nothing answers at http://127.0.0.1:9" in error


def test_no_address(run) -> None:
    status, _, error = run("selfcheck", "127.0.0.1:30000")
    assert status == 2 and "begins with http://" in error
