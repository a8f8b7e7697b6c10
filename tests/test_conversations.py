"""Conversations out of JSONL: both forms, several files, and lines that are neither."""

import json

import pytest

from eagle_jax.conversations import before_answer, files_of, read_conversations, read_questions

TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SHAREGPT = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


def write(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_both_forms_say_the_same(tmp_path):
    path = write(tmp_path / "a file.jsonl", {"messages": TURNS, "id": 1}, "", {"id": "x_0", "conversations": SHAREGPT})
    assert read_conversations(path) == [TURNS, TURNS]
    assert read_questions(path) == [TURNS[:2], TURNS[:2]]


def test_R4_several_files_and_globs_with_spaces_are_read_each_once_and_in_order(tmp_path, monkeypatch):
    folder = tmp_path / "two words"
    folder.mkdir()
    files = {name: write(folder / f"{name}.jsonl", {"messages": [{"role": "user", "content": name}]}) for name in "cab"}
    write(folder / "other.txt", "{")

    def contents(paths):
        return "".join(conversation[0]["content"] for conversation in read_conversations(paths))

    monkeypatch.chdir(tmp_path)
    assert contents("two words/*.jsonl") == "abc"
    assert contents(["two words/b.jsonl", "two words/*.jsonl"]) == "bac"
    assert contents([files["c"], files["a"]]) == "ca"


def test_a_file_whose_name_looks_like_a_glob_is_itself(tmp_path):
    path = write(tmp_path / "part[1].jsonl", {"messages": TURNS})
    assert files_of(path) == [path]


def test_a_glob_without_a_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"No file matches '.*nothing\*.jsonl'"):
        read_conversations(str(tmp_path / "nothing*.jsonl"))
    with pytest.raises(OSError, match=r"nothing\.jsonl"):
        read_conversations(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2 is not of the form"),
        ("[1]", "line 2 is not of the form"),
        ("3", "line 2 is not of the form"),
        ('{"text": "a"}', "line 2 is not of the form"),
        ('{"messages": [{"role": "user"}]}', "line 2 is not of the form"),
        ('{"messages": null}', "line 2 is not of the form"),
        ('{"conversations": [{"role": "user", "content": "a"}]}', "line 2 is not of the form"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "line 2 has the role 'tool'; known roles: system, user"),
        ('{"conversations": [{"from": "observation", "value": "a"}]}', "line 2 has the role 'observation'.*human, gpt"),
        ('{"messages": [{"role": ["user"], "content": "a"}]}', r"line 2 has the role \['user'\]"),
        ('{"messages": [{"role": "user", "content": 3}]}', "line 2 has a message whose content is a int"),
        ('{"conversations": [{"from": "human", "value": null}]}', "line 2 has a message whose content is a NoneType"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "two lines.jsonl", {"messages": TURNS}, line)
    with pytest.raises(ValueError, match=f"two lines.jsonl, {message}"):
        read_conversations(path)


def test_an_empty_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no conversation"):
        read_conversations(write(tmp_path / "empty.jsonl", ""))


def test_a_question_needs_something_to_be_answered(tmp_path):
    path = write(tmp_path / "answers.jsonl", {"messages": TURNS}, {"messages": TURNS[2:]})
    with pytest.raises(ValueError, match="line 2 asks nothing"):
        read_questions(path)


def test_what_stands_before_an_answer():
    asked, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    assert before_answer([asked, answer, asked]) == [asked]
    assert before_answer([answer]) == []
    assert before_answer([asked]) == [asked]
