"""Commands that ask a served model, against one that answers right and wrong."""

from __future__ import annotations

import io
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from served import PAGE, Served

from kvtier.cli import main
from kvtier.integration.probes import client, smoke
from kvtier.integration.probes.restore import forget


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
            ("dies", True, "/generate ended without an answer: see the server's log"),
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

    def test_copies_that_ranks_compute_for_themselves(self, served: Served, run) -> None:
        served.metrics += "kvtier_kv_copies 2.0\n"
        status, text, _ = run("selfcheck", served.url, "--tokens", "640")
        assert status == 0 and "The same" in text
        served.wrong = 0.5
        status, text, _ = run("selfcheck", served.url, "--tokens", "640")
        assert status == 2 and "Not decided:" in text and "2 ranks" in text
        assert "0.5" in text  # the figures are shown
        status, text, _ = run("selfcheck", served.url, "--tokens", "640", "--json")
        assert (status, json.loads(text)["undecided"]) == (2, True)
        for tolerance, wanted in (("0.6", 0), ("0.1", 1)):
            options = ("--tokens", "640", "--tolerance", tolerance)
            assert run("selfcheck", served.url, *options)[0] == wanted

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


CODE = re.compile(r"The code of (\w+) is (\d+)\.")


class TestBenchCold:
    @staticmethod
    def reader(*, lost: str = "") -> Callable[[dict], dict]:
        """A model that finds every code but one city's."""

        def chat(body: dict) -> dict:
            codes = CODE.findall(body["messages"][0]["content"])
            return {"content": "\n".join(f"{c}: {n}" for c, n in codes if c != lost)}

        return chat

    def test_a_new_prompt_of_that_length_with_all_needles_found(self, served: Served, run) -> None:
        served.chat = self.reader()
        status, text, _ = run("bench", "cold", served.url, "--tokens", "20000", "--json")
        assert status == 0
        found = json.loads(text)
        assert found["cached_tokens"] == 0
        assert found["prompt_tokens"] == pytest.approx(20_000, rel=0.02)
        assert [needle["found"] for needle in found["needles"]] == [True] * 5
        paths = [path for path, _ in served.bodies]
        assert paths.index("/flush_cache") < paths.index("/v1/chat/completions")

        [prompt] = [body for path, body in served.bodies if path == "/v1/chat/completions"]
        text = prompt["messages"][0]["content"]
        for needle in found["needles"]:
            place = text.index(f"The code of {needle['city']} is {needle['code']}.")
            assert place / len(text) == pytest.approx(needle["depth"], abs=0.02)

    def test_no_two_prompts_begin_alike(self, served: Served, run) -> None:
        for _ in range(2):
            run("bench", "cold", served.url, "--tokens", "300", "--needles", "0")
        chats = [body for path, body in served.bodies if path == "/v1/chat/completions"]
        first, second = (body["messages"][0]["content"] for body in chats)
        assert first[:20] != second[:20]

    def test_a_lost_needle_is_named(self, served: Served, run) -> None:
        served.chat = self.reader(lost="Oslo")
        status, text, _ = run("bench", "cold", served.url, "--tokens", "2000")
        assert status == 1
        assert "needles: 4 of 5 found; Oslo at 50% missed" in text

    def test_cached_tokens_are_said(self, served: Served, run) -> None:
        served.chat = self.reader()
        served.cached_from_start = 192
        status, text, _ = run("bench", "cold", served.url, "--tokens", "2000")
        assert status == 1 and "192 of them from a cache" in text

    def test_a_server_without_a_cache_report(self, served: Served, run) -> None:
        served.cache_report = False
        status, _, error = run("bench", "cold", served.url, "--tokens", "2000")
        assert status == 2 and "--enable-cache-report" in error

    def test_the_least_free_memory_while_it_ran(self, served: Served, run, cards) -> None:
        reader = self.reader()
        served.chat = lambda body: reader(body) if cards.wait(60) else {}
        status, text, _ = run("bench", "cold", served.url, "--tokens", "2000", "--json")
        [first, second] = json.loads(text)["cards"]
        assert status == 0
        assert (first["least_free"], second["least_free"]) == (3 * 2**30, 7 * 2**30)


class TestBenchRestore:
    @pytest.fixture
    def port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    @pytest.fixture
    def bench(self, run, port: int) -> Callable[..., tuple[int, str, str]]:
        """Run the command on the server that the words after -- start."""

        def bench(*command: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
            url = f"http://127.0.0.1:{port}"
            words = ("bench", "restore", "--url", url, "--tokens", "640", *options)
            return run(*words, "--", *command)

        return bench

    @staticmethod
    def server(port: int, file: Path, wrong: float = 0.0) -> tuple[str, ...]:
        program = Path(__file__).parent / "served.py"
        return (sys.executable, str(program), str(port), str(file), str(wrong))

    @staticmethod
    def runs(pid: int) -> bool:
        stat = Path(f"/proc/{pid}/stat")
        return stat.exists() and ") Z " not in stat.read_text()

    def test_a_session_over_kill_9(self, bench, port: int, tmp_path: Path) -> None:
        file = tmp_path / "known"
        status, text, _ = bench(*self.server(port, file), options=("--json",))
        found = json.loads(text)
        assert (status, found["same"]) == (0, True)
        assert found["prompts"][0]["restored"]["storage"] == 640
        assert found["start_seconds"] > 0 and found["start_after_kill_seconds"] > 0
        known = json.loads(file.read_text())
        # Two lives; only the second one ended in order, and no process of them is left.
        assert (len(known["children"]), known["ended"]) == (2, 1)
        assert not any(map(self.runs, known["children"]))

    def test_what_is_not_the_same_is_said(self, bench, port: int, tmp_path: Path) -> None:
        status, text, _ = bench(*self.server(port, tmp_path / "known", 1e-12))
        assert status == 1
        assert "640 from the store" in text and "Different:" in text

    def test_a_server_that_runs_already_is_left_alone(self, bench, run, served: Served) -> None:
        status, _, error = run("bench", "restore", "--url", served.url, "--", "false")
        assert status == 2 and "answers at" in error and "already" in error

    def test_where_the_server_answers_is_read_from_its_command(self, run, served: Served) -> None:
        port = served.url.rpartition(":")[2]
        for words in (["--port", port], [f"--port={port}", "--host", "0.0.0.0"]):
            status, _, error = run("bench", "restore", "--", "false", "--", *words)
            assert status == 2 and f"answers at {served.url} already" in error
        status, _, error = run("bench", "restore", "--", "false", "--port", "many")
        assert status == 2 and "--port many: give a number" in error

    def test_a_server_that_does_not_start(self, bench) -> None:
        words = "echo 'error: no such model'; echo 'note: that was all'; exit 3"
        status, _, error = bench("sh", "-c", words)
        assert status == 2 and "ended while starting; it said last: error: no such model" in error
        Path(error.rpartition(" ")[2].rstrip(").")).unlink()

    def test_a_server_that_says_nothing_leaves_no_log(self, bench) -> None:
        status, _, error = bench("false")
        assert status == 2 and "it said nothing: run the command by itself." in error
        assert ".log" not in error

    def test_no_such_command(self, bench) -> None:
        status, _, error = bench("/no/such/program")
        assert status == 2 and "/no/such/program cannot be run" in error

    def test_no_command(self, run) -> None:
        status, _, error = run("bench", "restore")
        assert status == 2 and "Say how to start the server" in error

    def test_the_page_cache_of_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "inner").mkdir()
        (tmp_path / "inner" / "file").write_bytes(b"x" * 4096)
        assert forget(tmp_path) == 1
        assert forget(tmp_path / "none") == 0


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Two cards; the first has less and less free memory, but 3 GiB at least, and then more. The
    event says that it has been seen with the least."""
    samples = [iter(()), iter(())]
    seen = threading.Event()

    def memory(number: int) -> SimpleNamespace:
        free = next(samples[number], (9 if number == 0 else 7) * 2**30)
        if free == 4 * 2**30:
            seen.set()
        return SimpleNamespace(total=80 * 2**30, free=free)

    def init() -> None:
        samples[0] = iter([gib * 2**30 for gib in (8, 5, 3, 4)])

    nvml = ModuleType("pynvml")
    nvml.NVMLError = OSError
    nvml.nvmlInit, nvml.nvmlShutdown = init, lambda: None
    nvml.nvmlDeviceGetCount = lambda: 2
    nvml.nvmlDeviceGetHandleByIndex = lambda number: number
    nvml.nvmlDeviceGetName = lambda number: "NVIDIA Test"
    nvml.nvmlDeviceGetMemoryInfo = memory
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return seen


class TestWatch:
    def test_it_ends_after_so_many_seconds(self, run, cards) -> None:
        status, text, _ = run("watch", "0.6", "--json")
        assert status == 0 and [card["number"] for card in json.loads(text)] == [0, 1]

    def test_ctrl_c_shows_the_least_of_all_samples(self, run, cards, monkeypatch) -> None:
        def interrupt(_: float) -> None:
            assert cards.wait(60)
            raise KeyboardInterrupt

        clock = SimpleNamespace(monotonic=time.monotonic, sleep=interrupt)
        monkeypatch.setattr(sys.modules["kvtier.cli.watch"], "time", clock)
        status, text, _ = run("watch")
        assert status == 0
        assert "0 NVIDIA Test 85.9 GB 3.22 GB" in text and "1 NVIDIA Test 85.9 GB 7.52 GB" in text

    def test_no_cards(self, run, cards, monkeypatch) -> None:
        def fail() -> None:
            raise OSError("Driver Not Loaded")

        monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", fail)
        status, _, error = run("watch", "0.1")
        assert status == 2 and "no NVIDIA card to watch here (Driver Not Loaded)" in error

    def test_no_library(self, run, monkeypatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        status, _, error = run("watch", "0.1")
        assert status == 2 and "pip install nvidia-ml-py" in error


class TestSmoke:
    @staticmethod
    def right(body: dict) -> dict:
        """A model that does all it is asked."""
        last = body["messages"][-1]
        said = str(last["content"])
        if last["role"] == "tool":
            return {"content": f"There are {json.loads(said)['count']:,} in stock."}
        if "tools" in body:
            item = said.split('"')[1]
            function = {"name": "count_stock", "arguments": json.dumps({"item": item})}
            return {"content": None, "tool_calls": [{"id": "call_1", "function": function}]}
        if "response_format" in body:
            return {"content": json.dumps(smoke.PERSON)}
        if "image_url" in said:
            return {"content": "Red."}
        return {"content": dict(smoke.TURNS).get(said, "391")}

    def test_all_right(self, served: Served, run) -> None:
        served.chat = self.right
        status, text, _ = run("smoke", served.url, "--image")
        assert status == 0
        assert text.count("ok ") == 5 and "failed" not in text
        chats = [body for path, body in served.bodies if path == "/v1/chat/completions"]
        assert sum(1 for body in chats if "tools" in body) == 24
        # The conversation grows: its last question comes after three questions and answers.
        assert max(len(body["messages"]) for body in chats) == 7

    @pytest.mark.parametrize(
        ("name", "wrong", "said"),
        [
            ("17 * 23", {"content": "392"}, "arithmetic (0.0 s): expected 391, got 392"),
            ("as JSON", {"content": '{"name": "Anna"}'}, '"city": "Oslo"}, got {"name": "Anna"}'),
            ("as JSON", {"content": "Anna"}, "got Anna"),
            (
                "hammers",
                {"content": "31 [/stock]"},
                "--tool-call-parser) in round trip 8, got 31 [",
            ),
            ('"count": 402', {"content": "Many."}, "expected 402 in round trip 12, got Many."),
            ("Add 3", {"content": "4821"}, "expected 4820 in turn 2, got 4821"),
        ],
    )
    def test_what_is_wrong_is_said(self, served: Served, run, name, wrong, said) -> None:
        def chat(body: dict) -> dict:
            return wrong if name in str(body["messages"][-1]["content"]) else self.right(body)

        served.chat = chat
        status, text, _ = run("smoke", served.url)
        assert status == 1
        assert text.count("ok ") == 3 and text.count("failed ") == 1
        assert said in text

    def test_a_call_of_another_item(self, served: Served, run) -> None:
        def chat(body: dict) -> dict:
            reply = self.right(body)
            for call in reply.get("tool_calls", ()):
                call["function"]["arguments"] = '{"item": "pears"}'
            return reply

        served.chat = chat
        status, text, _ = run("smoke", served.url, "--json")
        [failed] = [check for check in json.loads(text) if not check["ok"]]
        assert status == 1
        assert failed["got"] == 'count_stock({"item": "pears"})'

    def test_who_refuses_the_plainest_question_is_not_asked_more(self, served: Served, run) -> None:
        served.missing = {"/v1/chat/completions"}
        status, text, error = run("smoke", served.url)
        assert (status, text) == (2, "") and "has no /v1/chat/completions" in error

    def test_a_missing_key_ends_it(self, served: Served, run) -> None:
        served.key = "secret"
        status, text, error = run("smoke", served.url)
        assert (status, text) == (2, "") and "SGLANG_API_KEY" in error


def test_the_image_is_a_png_of_red_pixels() -> None:
    image = pytest.importorskip("PIL.Image")
    shown = image.open(io.BytesIO(smoke.red_square(32)))
    assert (shown.format, shown.size) == ("PNG", (32, 32))
    assert shown.convert("RGB").getcolors() == [(1024, (255, 0, 0))]
