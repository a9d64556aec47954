"""Prompts as lists of messages: checked, put through the model's template, and turned into tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from flows.run.inspection.task import look_at_task
from infra.contents import contents_of
from producers import chat
from producers.chat import load_tokenize_prompt
from producers.problems import TaskError, checked_problem
from producers.tasks import load_problems
from producers.tokenizing import TokenizerError, load_tokenize
from schemas.loading import RunFileError, load_run_file
from schemas.runspec import TaskSection
from tests.factories import make_chat_tokenizer, make_spec

ASKED = {"role": "user", "content": "2+2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWERED = {"role": "assistant", "content": "4"}
BEGAN = 1_735_000_000.0  # 24 December 2024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_tokenizer(tmp_path_factory.mktemp("chat") / "model")


def section(**task: Any) -> TaskSection:
    return TaskSection(**{"jsonl": "task.jsonl", "reward": "math:floor", **task})


def text_of(model: Path, prompt: Any, **task: Any) -> str:
    """The text whose tokens the model gets, with all special tokens."""
    tokens = load_tokenize_prompt(str(model), section(**task), BEGAN)(prompt)
    return str(Tokenizer.from_file(str(model / "tokenizer.json")).decode(tokens, skip_special_tokens=False))


def test_text_has_the_tokens_that_it_had_before_there_were_messages(model: Path) -> None:
    for text in ("2+2?", "<|im_start|>user\n😀", " "):
        plain = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
        assert (
            load_tokenize_prompt(str(model), section(), BEGAN)(text)
            == plain
            == load_tokenize(str(model))(text)
        )


def test_messages_go_through_the_template_and_get_one_beginning(model: Path) -> None:
    assert text_of(model, [ASKED]) == "<s><|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    tokens = load_tokenize_prompt(str(model), section(), BEGAN)([SYSTEM, ASKED])
    assert tokens.count(256) == 1 and tokens.count(258) == 3, "special tokens are tokens, and <s> comes once"


def test_text_becomes_a_message_if_the_task_says_so(model: Path) -> None:
    assert text_of(model, "2+2?", chat=True) == text_of(model, [ASKED])


def test_a_system_message_comes_first_unless_there_is_one(model: Path) -> None:
    with_system = text_of(model, [SYSTEM, ASKED])
    assert text_of(model, [ASKED], system="Be brief.") == with_system
    assert text_of(model, "2+2?", chat=True, system="Be brief.") == with_system
    assert text_of(model, [SYSTEM, ASKED], system="Be long.") == with_system
    developer = [{"role": "developer", "content": "x"}, ASKED]
    assert "Be long." not in text_of(model, developer, system="Be long.")


def test_a_template_of_the_user_s_own(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}é")
    assert text_of(model, [ASKED], chat_template=str(file)) == "[user: 2+2?]é"
    file.write_text("{{ strftime_now('%d %b %Y') }}")
    assert text_of(model, [ASKED], chat_template=str(file)) == "24 Dec 2024", "the day on which the run began"


def test_a_tokenizer_without_a_template_says_what_helps(tmp_path: Path) -> None:
    folder = make_chat_tokenizer(tmp_path / "base", template=None)
    with pytest.raises(TokenizerError) as caught:
        text_of(folder, [ASKED])
    assert f"the tokenizer in {folder} has no chat template" in str(caught.value)
    assert "task.chat_template" in str(caught.value) and "\n" not in str(caught.value)
    assert text_of(folder, "2+2?") == "2+2?"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "fails: TemplateError: roles must alternate"),
        ("{{ messages[7].role }}", "fails: UndefinedError"),
        ("{% for %}", "fails: TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__ }}", "fails: SecurityError"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "fails: SecurityError"),
        ("{{ messages.append(1) }}", "fails: SecurityError"),
        ("{{ 1 / 0 }}", "fails: ZeroDivisionError"),
        ("{{ 'x' * 5000000 }}", "makes a text of 5,000,000 characters; 4,194,304 are allowed"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "fails: TimeoutError: it takes longer than 0.5 s",
        ),
        (
            "{# " + "x" * (1 << 20) + " #}",
            "the chat template has 1,048,577 characters; 1,048,576 are allowed",
        ),
    ],
)
def test_templates_that_fail(
    model: Path, tmp_path: Path, template: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "MOST_TEMPLATE_S", 0.5)
    file = tmp_path / "bad.jinja"
    file.write_text(template)
    began = time.monotonic()
    with pytest.raises(TokenizerError) as caught:
        text_of(model, [ASKED], chat_template=str(file))
    assert message in str(caught.value) and str(file) in str(caught.value) and len(str(caught.value)) < 1_500
    assert time.monotonic() - began < 20


def test_a_template_that_is_no_text(model: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"task\.chat_template: .*bad\.jinja can't be read"):
        text_of(model, [ASKED], chat_template=str(tmp_path / "bad.jinja"))


def test_messages_of_a_problem() -> None:
    problem = checked_problem({"messages": [SYSTEM, ASKED, ANSWERED]}, 0, section())
    assert problem["prompt"] == [SYSTEM, ASKED] and problem["answer"] == "4"
    assert problem["messages"] == [SYSTEM, ASKED, ANSWERED]
    kept = checked_problem({"prompt": [ASKED, ANSWERED], "answer": "four"}, 0, section())
    assert kept["prompt"] == [ASKED] and kept["answer"] == "four"
    named = checked_problem({"talk": [ASKED], "messages": 3}, 0, section(prompt_field="talk"))
    assert named["prompt"] == [ASKED] and "answer" not in named
    both = checked_problem({"prompt": "text", "messages": [ASKED]}, 0, section())
    assert both["prompt"] == "text"
    filled = checked_problem({"messages": [{**ASKED, "name": None, "tool_calls": None}]}, 0, section())
    assert filled["prompt"] == [ASKED], "a dataset fills in what a row lacks"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "problem 3 has no text in 'messages'"),
        (["hello"], "problem 3: 'messages': message 0 is a str; a dict is expected"),
        ([{"role": "human", "content": "x"}], "message 0 has the role 'human'; roles are system, developer,"),
        ([{"content": "x"}], "message 0 has the role None"),
        ([{"from": "human", "value": "x"}], "message 0 has the role None"),
        ([ASKED, {"role": "user"}], "message 1 has no text in 'content'; its id is 'a'"),
        ([{"role": "user", "content": ["x"]}], "message 0 has no text in 'content'; a list is there"),
        ([{"role": ["user"], "content": "x"}], "message 0 has the role ['user']"),
        ([{"role": "user", "content": "a\0"}], "message 0 has the character U+0000"),
        ([{"role": "user", "content": "\ud800"}], "lone surrogate U+D800"),
        ([ANSWERED], "there is no message before the assistant's"),
        ([ASKED] * 1_001, "1,001 messages are too many; 1,000 are allowed"),
    ],
)
def test_messages_that_cannot_be_used(messages: list[Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        checked_problem({"id": "a", "messages": messages}, 3, section())
    assert message in str(caught.value)


def test_a_system_message_needs_messages() -> None:
    with pytest.raises(TaskError, match=r"to which task\.system can't be added: set task\.chat: true"):
        checked_problem({"prompt": "2+2?"}, 0, section(system="Be brief."))
    assert checked_problem({"prompt": "2+2?"}, 0, section(system="Be brief.", chat=True))["prompt"] == "2+2?"


def test_problems_of_messages_are_named_by_them(tmp_path: Path) -> None:
    rows = [{"messages": [ASKED]}, {"messages": [ASKED, ANSWERED]}, {"messages": [SYSTEM, ASKED]}]
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = make_spec().model_copy(update={"task": section(jsonl=str(tmp_path / "task.jsonl"))})
    first, second, third = [problem["id"] for problem in load_problems(spec, "train")]
    assert second == f"{first}-2" and third not in (first, second)


def looked_at(model: Path, tmp_path: Path, **task: Any) -> list[str]:
    rows = [{"id": "1", "messages": [ASKED, ANSWERED]}, {"id": "2", "messages": [{**ASKED, "role": "tool"}]}]
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, rows[: task.pop("rows", 1)])))
    (tmp_path / "reward.py").write_text(
        "def reward(problem, completion): return float(completion == problem['answer'])\n"
    )
    source = {"python": None, "jsonl": str(tmp_path / "task.jsonl"), "reward": f"{tmp_path}/reward.py:reward"}
    spec = make_spec(
        task={**source, **task},
        sampling={"max_prompt_tokens": 60}, trainer={"microbatch_tokens": 128},
    )  # fmt: skip
    return [one.line for one in look_at_task(spec, model)]


def test_a_check_tokenizes_with_the_template(model: Path, tmp_path: Path) -> None:
    whole = len(load_tokenize_prompt(str(model), section(), BEGAN)([ASKED]))
    found = looked_at(model, tmp_path)
    assert (
        f"tokenizer: prompts of {whole} to {whole} tokens; 60 are allowed (sampling.max_prompt_tokens)"
        in found
    )
    assert "reward: '4' earns 1 (reward)" in found


def test_a_check_says_which_problem_the_template_refuses(model: Path, tmp_path: Path) -> None:
    found = looked_at(model, tmp_path, rows=2)
    assert [line for line in found if "problem '2': the chat template of" in line and "no tools here" in line]


def test_the_template_is_a_file_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "run: a\nmodel: {path: m}\ntask: {jsonl: t.jsonl, reward: 'r.py:f', chat_template: c.jinja}\n"
    )
    (tmp_path / "c.jinja").write_text("{{ messages }}")
    spec = load_run_file(tmp_path / "run.yaml")
    assert spec.task.chat_template == str(tmp_path / "c.jinja")
    assert "task.chat_template" in contents_of(spec, "m")
    with pytest.raises(RunFileError, match=r"task\.dataset_config is for task\.dataset"):
        load_run_file(tmp_path / "run.yaml", ["task.dataset_config=main"])
