"""The file of conversations: what a kill, a rerun and duplicates leave in it."""

import json

import pytest

from eagle_jax.journal import Journal

OPTIONS = {"seed": 0, "temperatures": [0.0, 1.0]}


def order(name):
    return int(name.rpartition("-")[2]), name


def record(name, *texts, source="nothing"):
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
    return {"id": name, "messages": messages, "source": source}


def open_at(path, **options):
    return Journal(path / "chats.jsonl", OPTIONS | options, order)


def names(path):
    return [json.loads(line)["id"] for line in (path / "chats.jsonl").read_text().splitlines()]


def test_a_rerun_knows_what_is_settled(tmp_path):
    with open_at(tmp_path) as journal:
        journal.keep(record("nothing-3", "a", "b"))
        journal.drop("nothing-1", "too long")
    again = open_at(tmp_path)
    assert "nothing-3" in again and "nothing-1" in again and "nothing-2" not in again
    assert (again.kept, again.reasons) == (1, {"too long": 1})


@pytest.mark.parametrize("source", ["nothing", "prompt"])
def test_the_first_in_order_of_duplicates_stays(tmp_path, source):
    """Whichever was written first, and whether or not the run was interrupted between them."""
    same = [record(f"{source}-{i}", "a", "b", source=source) for i in range(3)]
    for number, sequence in enumerate(([0, 1, 2], [2, 1, 0], [1, 0, 2])):
        for cut in (1, 3):
            path = tmp_path / f"{number}{cut}"
            for part in (sequence[:cut], sequence[cut:]):
                with open_at(path) as journal:
                    for index in part:
                        journal.keep(same[index])
            assert names(path) == [f"{source}-0"]
            assert open_at(path).reasons == {"duplicate": 2}


def test_a_users_turn_that_was_written_counts_alone(tmp_path):
    with open_at(tmp_path) as journal:
        for source in ("nothing", "prompt"):
            journal.keep(record(f"{source}-1", "a", "b", source=source))
            assert journal.is_duplicate(f"{source}-4", source, record("", "a", "c")["messages"]) == (
                source == "nothing"
            )
            journal.keep(record(f"{source}-4", "a", "c", source=source))
    assert names(tmp_path) == ["nothing-1", "prompt-1", "prompt-4"]


def test_a_line_cut_in_half_was_never_there(tmp_path):
    with open_at(tmp_path) as journal:
        journal.keep(record("nothing-1", "a", "b"))
        journal.drop("nothing-2", "empty")
    for name, text in (("chats.jsonl", '{"id": "nothing-3", "mess'), ("chats.dropped.txt", "nothing-4 rep")):
        with open(tmp_path / name, "a") as file:
            file.write(text)
    with open_at(tmp_path) as journal:
        assert "nothing-3" not in journal and "nothing-4" not in journal
        journal.keep(record("nothing-5", "c", "d"))
        journal.drop("nothing-6", "empty")
    assert names(tmp_path) == ["nothing-1", "nothing-5"]
    assert (tmp_path / "chats.dropped.txt").read_text() == "nothing-2 empty\nnothing-6 empty\n"


def test_a_kill_between_two_duplicates_leaves_one(tmp_path):
    with open_at(tmp_path) as journal:
        journal.keep(record("nothing-5", "a", "b"))
    with open(tmp_path / "chats.jsonl", "a") as file:
        file.write(json.dumps(record("nothing-2", "a", "c")) + "\n")
    again = open_at(tmp_path)
    assert again.kept == 1 and again.reasons == {"duplicate": 1} and "nothing-5" in again
    with again:
        pass
    assert names(tmp_path) == ["nothing-2"] and open_at(tmp_path).reasons == {"duplicate": 1}


def test_an_error_leaves_the_lines_as_they_came(tmp_path):
    with pytest.raises(RuntimeError), open_at(tmp_path) as journal:
        for name in ("nothing-5", "nothing-2"):
            journal.keep(record(name, name, "b"))
        raise RuntimeError
    assert names(tmp_path) == ["nothing-5", "nothing-2"]


def test_nothing_is_written_before_it_is_entered(tmp_path):
    open_at(tmp_path / "there")
    assert list(tmp_path.iterdir()) == []


def test_other_options_are_refused(tmp_path):
    with open_at(tmp_path) as journal:
        journal.keep(record("nothing-1", "a", "b"))
    with pytest.raises(ValueError, match=r"was made with seed 0, not 1; give another output"):
        open_at(tmp_path, seed=1)
    with pytest.raises(ValueError, match="was made with turns None, not 2"):
        open_at(tmp_path, turns=2)
    (tmp_path / "chats.options.json").write_text("[")
    with pytest.raises(ValueError, match=r"chats\.options\.json is damaged"):
        open_at(tmp_path)
    (tmp_path / "chats.options.json").unlink()
    with pytest.raises(ValueError, match=r"is there already, without chats\.options\.json"):
        open_at(tmp_path)


def test_a_foreign_line_is_named(tmp_path):
    with open_at(tmp_path) as journal:
        journal.keep(record("nothing-1", "a", "b"))
    with open(tmp_path / "chats.jsonl", "a") as file:
        file.write('{"messages": []}\n')
    with pytest.raises(ValueError, match="line 2 is no written conversation"):
        open_at(tmp_path)
