"""The command line: what it prints, where, and with which exit code."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file, save_file

import ddtree
import talker
import tiny
from ddtree.cli import COMMANDS, main
from ddtree.cli import options as options_module
from ddtree.drafters.dflash import checkpoint

PROMPT = "To be, or not to be"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(talker.save(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def model(target):
    return ddtree.load(target, device="cpu")


@pytest.fixture
def run(target, capsys, monkeypatch):
    """Run a command on the tiny target; gives exit code, standard output and standard error."""

    def call(command, *more, stdin=None):
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        try:
            code = main([command, "--target", target, "--device", "cpu", "-n", "12", *more])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return call


def chat_text(model, **options):
    return model.generate(PROMPT, chat=True, max_tokens=12, **{"temperature": 0.0, **options}).text


def test_generate_prints_the_answer_alone(run, model):
    assert run("generate", PROMPT) == (0, chat_text(model) + "\n", "")


def test_a_prompt_comes_from_the_argument_a_file_or_standard_input(run, model, tmp_path):
    expected = chat_text(model) + "\n"
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    assert run("generate", "--file", str(tmp_path / "prompt.txt"))[1] == expected
    (tmp_path / "mark.txt").write_text(PROMPT + "\n", encoding="utf-8-sig")
    assert run("generate", "--file", str(tmp_path / "mark.txt"))[1] == expected
    assert run("generate", stdin=PROMPT + "\n")[1] == expected
    assert run("generate", "-", stdin=PROMPT)[1] == expected


def test_raw_leaves_the_template_out_and_system_goes_in(run, model):
    plain = model.generate(PROMPT, max_tokens=12, temperature=0).text
    assert run("generate", "--raw", PROMPT)[1] == plain + "\n" != chat_text(model) + "\n"
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": PROMPT}]
    assert run("generate", "--system", "be", PROMPT)[1] == (
        model.generate(messages, max_tokens=12, temperature=0).text + "\n"
    )


def test_json_holds_the_result(run, model):
    code, out, err = run("generate", "--json", "--seed", "5", "--logprobs", "2", "--budget", "7", PROMPT)
    expected = model.generate(PROMPT, chat=True, max_tokens=12, seed=5)
    found = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert found["token_ids"] == expected.token_ids and found["text"] == expected.text
    assert (found["finish_reason"], found["seed"]) == (expected.finish_reason, 5)
    assert len(found["logprobs"]) == len(expected.token_ids) and len(found["logprobs"][0]["top"]) == 2
    assert found["stats"]["method"] == "auto" and found["stats"]["drafter"] == "lookup"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_json_loses_no_character_whatever_standard_output_holds(run, monkeypatch, encoding):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding, write_through=True))
    assert run("generate", "--json", "--raw", "--ignore-eos", PROMPT)[0] == 0
    line = raw.getvalue()
    text = json.loads(line.decode(encoding))["text"]
    assert not text.isascii() and "?" not in text
    assert line.isascii() == (encoding != "utf-8")


def test_sampling_options_reach_the_sampler(run, model):
    options = [
        "--temperature", "0.9", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.2",
        "--presence-penalty", "0.1", "--frequency-penalty", "0.2", "--logit-bias", "70=2.5", "--logit-bias", "71=-3",
        "--bad-word", "e", "--min-tokens", "3", "--stop-token", "80", "--ignore-eos", "--seed", "9",
    ]  # fmt: skip
    fields = {
        "temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "logit_bias": {70: 2.5, 71: -3}, "bad_words": ["e"],
        "min_tokens": 3, "stop_token_ids": [80], "ignore_eos": True, "seed": 9,
    }  # fmt: skip
    assert run("generate", *options, PROMPT)[1] == chat_text(model, **fields) + "\n"


def test_the_answers_limit_is_that_of_the_library():
    assert options_module.MAX_TOKENS == ddtree.api.MAX_TOKENS


def test_a_seed_alone_means_sampling(run, model):
    assert run("generate", "--seed", "4", PROMPT)[1] == chat_text(model, seed=4, temperature=1.0) + "\n"


def test_figures_go_to_standard_error(run, model):
    _, out, err = run("generate", "--stats", "--method", "chain", PROMPT)
    assert out == chat_text(model) + "\n"
    assert "tokens/s" in err and "mostly chain@lookup" in err and err.count("\n") == 1
    assert "no drafting" in run("generate", "--stats", "--drafter", "none", PROMPT)[2]


def test_drafters_given_several_times_are_merged(run, tmp_path):
    folder = str(checkpoint.write(tmp_path, tiny.network(talker.model())))
    out = run("generate", "--json", "--drafter", folder, "--drafter", "lookup", PROMPT)[1]
    assert json.loads(out)["stats"]["drafter"] == "dflash+lookup"


def test_chat_keeps_the_history_until_it_is_reset(run, model):
    code, out, err = run("chat", stdin="hi\n\nthere\n/reset\n/help\nhi\n/exit\nnever\n")
    turns, texts = [], []
    for said in ("hi", "there"):
        turns.append({"role": "user", "content": said})
        texts.append(model.generate(turns, max_tokens=12, temperature=0).text)
        turns.append({"role": "assistant", "content": texts[-1]})
    first, second = texts
    help_line = "/reset forgets the conversation, /exit leaves; Ctrl-C stops an answer"
    assert (code, err) == (0, "")
    assert out == f"{first}\n{second}\n(forgotten)\n{help_line}\n{first}\n"


def test_chat_ends_with_its_input_and_tells_figures(run):
    code, _, err = run("chat", "--stats", stdin="hi")
    # A model this small is as fast with either.
    assert code == 0 and re.search(r"mostly (tree@lookup|chain@lookup|off)$", err.strip())


def test_a_conversation_that_fills_the_context_can_begin_anew(run):
    code, out, err = run("chat", "--max-context", "30", stdin=f"{'x' * 40}\n/reset\nhi\n")
    assert code == 0 and out.startswith("(forgotten)\n") and len(out) > 13
    assert err == (
        "ddtree: the prompt has 43 tokens and the context holds 30: shorten it to 29 or less (/reset begins anew)\n"
    )


def test_ctrl_c_stops_the_answer_and_not_the_program(run, monkeypatch):
    stream = ddtree.api.Stream.__next__
    count = 0

    def interrupted(self):
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return stream(self)

    monkeypatch.setattr(ddtree.api.Stream, "__next__", interrupted)
    code, out, _ = run("chat", "--ignore-eos", stdin="hi\nthere\n")
    first, second = out.splitlines()[0], out.splitlines()[-1]
    assert code == 0 and "(stopped)" in out and first and second


def test_inspect_tells_the_pair_and_exits_1_when_it_does_not_fit(target, tmp_path, capsys):
    fits = str(checkpoint.write(tmp_path / "fits", tiny.network(talker.model())))
    other = str(checkpoint.write(tmp_path / "other", tiny.network(tiny.model())))
    assert main(["inspect", target, "--drafter", fits]) == 0
    assert f"{fits} fits {target}" in capsys.readouterr().out
    assert main(["inspect", other, "--target", target]) == 1
    assert "  - vocabulary of 48 tokens is not the target's 260" in capsys.readouterr().out
    assert main(["inspect", target]) == 0
    assert "draft trees  can be verified" in capsys.readouterr().out


def test_inspect_exits_2_for_a_damaged_target(tmp_path, capsys):
    folder = talker.save(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["inspect", str(folder)]) == 2
    assert "is incomplete: 1 tensors are missing (model.norm.weight, ...)" in capsys.readouterr().err


def test_demo_passes_its_options_on(monkeypatch):
    def load(*given, **named):
        raise ddtree.ConfigError(f"{given} {named}")

    monkeypatch.setattr("ddtree.api.load", load)
    with pytest.raises(ddtree.ConfigError, match=r"\('demo',\) {'drafter': 'auto', .* 'dtype': 'float32'}"):
        main(["demo", "--debug", "--dtype", "float32", "one", "two"])


def test_train_has_its_own_options(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0 and "synthesize" in capsys.readouterr().out


def test_version_and_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"ddtree {ddtree.__version__}\n"
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^    {name}\b", text, re.MULTILINE) for name in COMMANDS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "-1", PROMPT], "budget=-1 is outside 0..1024"),
        (["--budget", "many", PROMPT], "argument --budget: 'many' is neither a whole number nor auto"),
        (["--method", "magic", PROMPT], "argument --method: invalid choice: 'magic'"),
        (["--depth", "17", PROMPT], "depth=17 is outside 1..16"),
        (["--temperature", "-2", PROMPT], "temperature must be from 0 to 100, not -2.0"),
        (["--seed", "-2", PROMPT], "seed must be from -1 to 9223372036854775807, not -2"),
        (["--seed", str(2**63), PROMPT], "seed must be from -1 to"),
        (["--max-tokens", str(10**30), PROMPT], "max_tokens must be from 1 to"),
        (["--logit-bias", "70", PROMPT], "--logit-bias '70' must be written ID=NUMBER"),
        (
            ["--logit-bias", "70=1", "--logit-bias", " 70 =2", PROMPT],
            "--logit-bias names token 70 twice: give it once",
        ),
        (["--logit-bias", "70=1", "--logit-bias", "070=2", PROMPT], "logit_bias names token 70 twice"),
        (
            ["--logprobs", "2", PROMPT],
            "--logprobs is shown with --json only: add it, or leave --logprobs out",
        ),
        (["--logit-bias", "a=1", PROMPT], "a token id in logit_bias must be an integer"),
        (["--threads", "0", PROMPT], "--threads 0 is outside 1..1024"),
        (["--max-context", "1", PROMPT], "max_context must be at least 2, not 1"),
        (["--device", "toaster", PROMPT], "unknown device 'toaster'"),
        (["--drafter", "/no/such/drafter", PROMPT], "/no/such/drafter does not exist"),
        (
            ["--drafter", "auto", "--drafter", "lookup", PROMPT],
            "cannot hold auto, which chooses by itself: give it alone",
        ),
        (["--drafter", "lookup", "--drafter", "none", PROMPT], "must hold drafters to merge"),
        (["--target", "/no/such/model", PROMPT], "/no/such/model does not exist"),
        (["--system", "be", "--raw", PROMPT], "--system needs a chat template"),
        (["--file", "/no/such/file"], "/no/such/file cannot be read (No such file or directory)"),
        (["--file", "x", PROMPT], "the prompt is given twice"),
        ([""], "the prompt is empty"),
        (["x" * 600], "tokens and the context holds 512: shorten it to 511 or less"),
        ([PROMPT, "more"], "unrecognized arguments: more"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, options, message):
    code, out, err = run("generate", *options)
    assert (code, out) == (2, "")
    assert message in err and err.startswith("ddtree") and err.count("\n") == 1


def test_without_a_prompt_on_a_terminal_it_is_asked_for(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "there is no prompt: give it as an argument" in run("generate")[2]
    assert "the prompt is empty" in run("generate", stdin="\n")[2]


def test_debug_shows_where(target):
    with pytest.raises(ddtree.ConfigError):
        main(["generate", "--debug", "--target", target, "--budget", "-1", PROMPT])


def test_an_error_that_is_nobodys_fault_is_one_line_too(run, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("ddtree.api.load", broken)
    assert run("generate", PROMPT) == (
        2,
        "",
        "ddtree: error: RuntimeError: first second (--debug shows where)\n",
    )


def test_a_standard_output_that_is_closed_is_named(run, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    code, _, err = run("generate", PROMPT)
    assert (code, err) == (
        2,
        "ddtree: error: standard output is closed: leave it open, or send it to a file\n",
    )


def test_ctrl_c_exits_with_130(run, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("ddtree.api.load", interrupt)
    assert run("generate", PROMPT) == (130, "", "")


def test_help_and_version_do_not_wait_for_torch():
    code = (
        "import sys\nfrom ddtree.cli import COMMANDS, main\n"
        "for command in ([], *([name] for name in COMMANDS if name != 'train')):\n"
        "    try: main([*command, '--help'])\n"
        "    except SystemExit as ended: assert not ended.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def spawn(target, *more, **pipes):
    command = [sys.executable, "-m", "ddtree", "generate", "--target", target, "--device", "cpu", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **pipes)


@pytest.mark.slow
def test_without_a_standard_output_it_is_one_line(target):
    command = [sys.executable, "-m", "ddtree", "generate", "--target", target, PROMPT]
    done = subprocess.run(command, stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1), timeout=60)
    assert done.returncode == 2
    assert done.stderr == b"ddtree: error: standard output is closed: leave it open, or send it to a file\n"


@pytest.mark.slow
def test_a_reader_that_leaves_ends_it_quietly(target):
    process = spawn(target, "--ignore-eos", "-n", "500", PROMPT)
    process.stdout.read(3)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_an_answer_exits_with_130(target):
    # A shell without job control starts background jobs with the interrupt ignored, and children inherit that.
    interruptible = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = spawn(target, "--ignore-eos", "-n", "500", "--threads", "1", PROMPT, **interruptible)
    process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    assert process.wait(timeout=60) == 130
    assert time.monotonic() - started < 30
    assert process.stderr.read() == b""
