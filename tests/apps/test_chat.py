"""A conversation without a terminal: history, options, commands, files."""

from __future__ import annotations

import json

import pytest

from ringkv import RingConfig, RingkvError, SamplingParams
from ringkv.apps.chat.commands import COMMANDS, handle
from ringkv.apps.chat.session import ChatSession
from ringkv.apps.chat.transcript import ring_path
from scripted import Script


class Asked:
    """A session whose model answers with given texts, and keeps the prompts that it read."""

    def __init__(self, *answers, ring=None, **options):
        self.prompts, left = [], list(answers)

        def script(ids):
            self.prompts.append(ids)
            return self.script.ids(left.pop(0))

        self.script = Script(script, ring=ring)
        self.session = ChatSession(self.script.engine, SamplingParams(**{"temperature": 0, **options}))

    def say(self, text):
        return "".join(event.text for event in self.session.send(text) if event.channel == "answer")


END = "<|im_end|>"


def test_the_next_prompt_holds_answers_without_thoughts():
    """CASES T5."""
    asked = Asked(f"<think>\nhm\n</think>\n\nYes{END}", f"No{END}")
    assert asked.say("Hi") == "Yes"
    assert asked.session.thought == "hm"
    assert asked.session.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    asked.say("Yo")
    turn = "<|im_start|>{}\n{}<|im_end|>\n".format
    text = turn("user", "Hi") + turn("assistant", "Yes") + turn("user", "Yo") + "<|im_start|>assistant\n"
    assert asked.prompts[1] == asked.script.ids(text)
    assert asked.session.stats()["turns"] == 2


def test_a_cut_answer_goes_on_from_its_tokens():
    asked = Asked("one two", f" three{END}", f"four{END}", max_tokens=7)
    asked.say("Hi")
    assert asked.session.unfinished
    list(asked.session.resume())
    assert asked.prompts[1] == asked.prompts[0] + asked.script.ids("one two")
    assert asked.session.turns[-1]["content"] == "one two three"
    assert not asked.session.unfinished
    with pytest.raises(RingkvError, match="no answer was cut off"):
        asked.session.resume()


@pytest.mark.parametrize("pin", ["system", "prompt"])
def test_a_cut_answer_goes_on_under_a_pin_that_ends_before_it(pin):
    """The same span is pinned for the rest of the answer as for its beginning, and never the answer."""
    asked = Asked("one two", f" three{END}", max_tokens=7, ring=RingConfig(120, 8, "streaming", "all", pin=pin))
    asked.session.set_system("Be brief.")
    asked.say("Hi")
    ring = asked.script.engine.ring
    before = int(ring.pin[0])
    system = len(asked.script.ids("<|im_start|>system\nBe brief.<|im_end|>\n"))
    assert before == (system if pin == "system" else len(asked.prompts[0]))
    list(asked.session.resume())
    assert asked.prompts[1] == asked.prompts[0] + asked.script.ids("one two")
    assert int(ring.pin[0]) == before
    assert asked.session.turns[-1]["content"] == "one two three"


def test_a_thought_goes_on_as_it_began_though_the_option_changed():
    asked = Asked("<think>\nab", f"c\n</think>\n\nYes{END}", max_tokens=4)
    asked.say("Hi")
    asked.session.set("thinking", False)
    list(asked.session.resume())
    assert asked.prompts[1] == asked.prompts[0] + asked.script.ids("<think>\nab")
    assert asked.session.thought.strip() == "abc"
    assert asked.session.params.thinking is False


def test_half_a_character_is_drawn_again_when_an_answer_goes_on():
    asked = Asked("abé", f"é!{END}", max_tokens=3)
    asked.say("Hi")
    list(asked.session.resume())
    assert asked.prompts[1] == asked.prompts[0] + asked.script.ids("ab")
    assert asked.session.turns[-1]["content"] == "abé!"


def test_an_interrupt_and_a_closed_stream_keep_what_came():
    """CASES C1."""
    asked = Asked("a" * 50, "b" * 50, f"c{END}")
    for step, _ in enumerate(asked.session.send("Hi")):
        if step == 3:
            asked.script.engine.cancel(0)
    assert (asked.session.last.finish_reason, asked.session.turns[-1]["content"]) == ("cancelled", "aaaaa")
    stream = asked.session.send("Yo")
    next(stream)
    stream.close()
    assert [turn["content"] for turn in asked.session.turns] == ["Hi", "aaaaa", "Yo", "b"]
    assert asked.session.unfinished
    assert asked.say("So") == "c"


def test_retry_replaces_the_answer_and_takes_the_next_seed():
    asked = Asked(f"a{END}", f"b{END}", f"c{END}", f"d{END}", seed=7)
    asked.say("Hi")
    list(asked.session.retry())
    assert asked.session.last.ring["seed"] == 8
    list(asked.session.retry())
    assert asked.session.last.ring["seed"] == 9
    asked.session.set("seed", 3)
    list(asked.session.retry())
    assert asked.session.last.ring["seed"] == 3
    assert [turn["content"] for turn in asked.session.turns] == ["Hi", "d"]
    assert len({tuple(prompt) for prompt in asked.prompts}) == 1


def test_a_question_that_is_refused_leaves_no_trace():
    asked = Asked(f"a{END}")
    asked.say("Hi")
    before = list(asked.session.turns)
    for text in ("", " \n", "\ud800"):
        with pytest.raises(RingkvError):
            asked.session.send(text)
    assert asked.session.turns == before
    with pytest.raises(RingkvError, match="nothing was asked"):
        Asked().session.retry()


@pytest.mark.parametrize(
    "line, name, value",
    [
        ("temperature 1", "temperature", 1),
        ("top_k 40", "top_k", 40),
        ("thinking false", "thinking", False),
        ('stop ["a", "b"]', "stop", ("a", "b")),
        ("stop END", "stop", ("END",)),
        ("on_repetition ignore", "on_repetition", "ignore"),
        ("seed none", "seed", None),
        ("temperature default", "temperature", None),
    ],
)
def test_set(line, name, value):
    session = Asked().session
    handle(session, f"/set {line}")
    assert getattr(session.params, name) == value


@pytest.mark.parametrize("line", ["temperature -1", "top_p NaN", "temprature 1", "n 2", "n none", "seed", "min_p x"])
def test_set_refuses_by_name(line):
    session = Asked().session
    before = session.params
    with pytest.raises(RingkvError, match=line.split()[0]):
        handle(session, f"/set {line}")
    assert session.params == before


def test_set_changes_stats_and_results():
    asked = Asked(f"a{END}")
    assert "temperature 0 (user)" in handle(asked.session, "/stats").text
    handle(asked.session, "/set temperature 0.25")
    assert "temperature 0.25 (user)" in handle(asked.session, "/stats").text
    asked.say("Hi")
    assert asked.session.last.sampling["temperature"] == {"value": 0.25, "source": "user"}
    assert "2 new tokens" in handle(asked.session, "/stats").text


def test_what_begins_with_a_slash_is_never_sent():
    """CASES C2."""
    asked = Asked(f"a{END}")
    for line in ("/nosuch thing", "/", "/home/me is a folder", "/HELP"):
        reply = handle(asked.session, line)
        assert reply.events is None
        assert f"{line.split()[0]} is no command and was not sent" in reply.text
    assert "/retry?" in handle(asked.session, "/rety").text
    assert asked.prompts == []
    list(handle(asked.session, " /home is a folder").events)
    assert asked.session.turns[0]["content"] == "/home is a folder"
    assert handle(asked.session, "  ").events is None
    assert handle(asked.session, "/quit").quit
    assert handle(asked.session, "/exit").quit


def test_commands_do_what_help_says():
    asked = Asked(f"<think>\nhm\n</think>\n\nYes{END}")
    session = asked.session
    assert all(name in handle(session, "/help").text for name in COMMANDS)
    handle(session, "/system Be brief.")
    assert session.messages == [{"role": "system", "content": "Be brief."}]
    list(handle(session, "Hi").events)
    assert handle(session, "/think").text == "thoughts are hidden"
    assert handle(session, "/think").text.endswith("hm")
    handle(session, "/reset")
    assert [message["role"] for message in session.messages] == ["system"]
    handle(session, "/system -")
    assert session.messages == []


@pytest.mark.parametrize("name", ["/help", "/reset", "/think", "/stats", "/retry", "/continue", "/quit"])
def test_what_a_command_has_no_use_for_is_refused(name):
    session = Asked().session
    with pytest.raises(RingkvError, match=f"^{name} = 'now please': accepted is {name} alone$"):
        handle(session, f"{name} now please")
    assert session.show_thinking


def test_save_and_load(tmp_path):
    asked = Asked(f"Yes ✓{END}", stop=["x"], logit_bias={3: 1.0})
    handle(asked.session, "/system Be brief.")
    asked.say("Hi")
    path = tmp_path / "a chat.json"
    assert "1 turn" in handle(asked.session, f"/save {path}").text
    other = Asked(f"b{END}")
    handle(other.session, f"/load {path}")
    assert other.session.messages == asked.session.messages
    assert other.session.params == asked.session.params
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as an editor may leave it
    ring_path(path).unlink()
    handle(other.session, f"/load {path}")
    assert other.session.messages == asked.session.messages
    other.say("Yo")
    assert len(other.session.turns) == 4
    assert [file.name for file in tmp_path.iterdir()] == ["a chat.json"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda record: [], "no saved conversation"),
        (lambda record: record | {"ringkv_chat": 2}, "no saved conversation"),
        (lambda record: record | {"messages": "x"}, "messages = 'x'"),
        (lambda record: record | {"messages": [{"role": "user"}]}, r"messages\[0\]"),
        (lambda record: record | {"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content"),
        (lambda record: record | {"messages": record["messages"][::-1]}, r"messages\[0\].role"),
        (lambda record: record | {"messages": record["messages"][:1]}, "the last one is the user's"),
        (lambda record: record | {"params": {"temprature": 1}}, "temprature"),
        (lambda record: record | {"params": {"temperature": -1}}, "temperature"),
        (lambda record: record | {"params": {"n": 2}}, "n = 2"),
    ],
)
def test_load_refuses_and_changes_nothing(tmp_path, change, message):
    asked = Asked(f"Yes{END}")
    asked.say("Hi")
    path = tmp_path / "chat.json"
    asked.session.save(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    before = list(asked.session.turns)
    with pytest.raises(RingkvError, match=message) as caught:
        asked.session.load(path)
    assert str(caught.value).startswith(f"load: {str(path)!r}: ")
    assert asked.session.turns == before


def test_files_that_cannot_be_read_or_written(tmp_path):
    session = Asked().session
    (tmp_path / "bad").write_bytes(b"\xff{")
    (tmp_path / "folder").mkdir()
    for line, message in {
        "/save": "^save = '': accepted is the name of a file$",
        f"/save {tmp_path}/folder": "^save = '.*/folder': accepted is a regular file$",
        "/load": "^load = '': accepted is the name of a file$",
        "/load ~nobody-of-this-name/x": "^load: '~nobody-of-this-name/x': Could not",
        f"/save {tmp_path}/none/x": "save = .*no folder",
        f"/load {tmp_path}/x": "No such file",
        f"/load {tmp_path}": "load: ",
        f"/load {tmp_path}/bad": "not JSON in UTF-8",
    }.items():
        with pytest.raises(RingkvError, match=message):
            handle(session, line)


def going_on(asked):
    """Another session with the same model, whose script goes on where that one's stands."""
    other = Asked()
    runner = other.script.engine._runner
    put = runner.put

    def told(lane, held, seed, sample):
        put(lane, held, seed, sample)
        other.script.said[lane] = int(held["seen"]), asked.script.ids("y" * 60 + END)  # told from here on

    runner.put = told
    return other


def test_a_saved_conversation_keeps_its_ring(tmp_path):
    """Only the question is read: what was said before is in the ring, the thought too. Oracle: the ring's own ids."""
    asked = Asked(f"<think>\nhm\n</think>\n\nYes{END}", f"No{END}")
    asked.say("Hi")
    asked.session.save(tmp_path / "a.json")
    assert (tmp_path / "a.json.ringkv.thought").stat().st_mode & 0o777 == 0o600
    seen = asked.session.last.snapshot
    other = going_on(asked)
    assert other.session.load(tmp_path / "a.json") == "with its ring"
    assert other.session.messages == asked.session.messages
    read = []
    feed = other.script.engine._runner.read
    other.script.engine._runner.read = lambda lane, ids, progress: read.append(list(ids)) or feed(lane, ids, progress)
    *_, last = other.session.send("Yo")
    turn = asked.script.ids("\n<|im_start|>user\nYo<|im_end|>\n<|im_start|>assistant\n")
    assert read == [[seen.tokens[-1], *turn]]
    assert other.prompts == []
    assert last.completion.snapshot.prompt == [*seen.prompt, *seen.tokens, *turn]
    *_, again = other.session.retry()  # from the same ring
    assert read[1] == read[0]
    assert again.completion.snapshot.prompt == last.completion.snapshot.prompt
    *_, third = other.session.send("So?")  # and on
    assert third.completion.snapshot.prompt[: len(last.completion.snapshot.prompt)] == last.completion.snapshot.prompt


def test_an_answer_that_was_cut_goes_on_after_loading(tmp_path):
    asked = Asked("one two three four", max_tokens=7)
    asked.say("Hi")
    asked.session.save(tmp_path / "a.json")
    other = going_on(asked)
    other.session.load(tmp_path / "a.json")
    assert other.session.unfinished
    list(other.session.resume())
    assert other.session.last.token_ids[:7] == asked.script.ids("one two")
    assert other.session.last.completion_tokens == 14
    assert other.session.turns[-1]["content"] == other.session.last.text
    assert len(other.session.turns) == 2


def test_a_ring_that_does_not_fit_is_said_and_the_conversation_is_read_anew(tmp_path):
    asked = Asked(f"Yes{END}", f"No{END}", f"Maybe{END}")
    asked.say("Hi")
    asked.session.save(tmp_path / "a.json")
    asked.session.save(tmp_path / "b.json")
    ring, other = tmp_path / "a.json.ringkv.thought", tmp_path / "b.json.ringkv.thought"
    whole = ring.read_bytes()
    for data, said in (
        (whole[:-3], "without its ring (snapshot"),
        (other.read_bytes(), "without its ring, which is of another save"),
        (None, "No such file"),
    ):
        ring.unlink() if data is None else ring.write_bytes(data)
        assert said in asked.session.load(tmp_path / "a.json")
        assert [turn["content"] for turn in asked.session.turns] == ["Hi", "Yes"]
    asked.say("Yo")
    text = asked.script.tokenizer.decode(asked.prompts[1])
    assert "Hi" in text
    assert "Yes" in text
    asked.session.set_system("Be brief.")  # it stands before all: the ring cannot have it
    asked.session.load(tmp_path / "b.json")
    asked.session.set_system("Be brief.")
    asked.say("Yo")
    assert "Be brief." in asked.script.tokenizer.decode(asked.prompts[-1])
