"""What is dropped: loops, and pieces of evaluation texts. And prompt files: what is read of them."""

import pytest

from eagle_jax.prompts import Opening, read_openings, read_texts
from eagle_jax.screening import Overlap, loops

USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([7] * 32, True),
        ([7] * 31, False),  # a ruled line
        ([1, 2, 3, 4, 5, 6, 7, 8] * 4, True),
        ([9, 9, 9] + [1, 2, 3, 4, 5, 6, 7, 8] * 4 + [9], True),
        ([1, 2, 3, 4, 5, 6, 7, 8] * 3 + [1, 2, 3], False),  # three times and a half
        (list(range(50)) * 4, True),
        (list(range(50)) * 3, False),
        ([*range(10), 0, *range(10), 1, *range(10), 2, *range(10), 3], False),  # a list of like lines
        (list(range(300)), False),
        ([], False),
        ([1], False),
    ],
)
def test_a_loop_stands_four_times_in_a_row(ids, expected):
    assert loops(ids, 4) == expected


def test_the_number_of_repeats_is_an_option():
    assert loops(list(range(20)) * 2, 2) and not loops(list(range(20)) * 2, 3)


def test_overlap_is_so_many_words_in_a_row_whatever_stands_between_them():
    overlap = Overlap(["One two, three four; FIVE six?"], words=4)
    assert overlap.found_in("He said: two three\nfour 'five'!")
    assert not overlap.found_in("two three four")
    assert not overlap.found_in("two three and four five")


def test_a_shorter_text_is_found_only_where_it_is_all_there_is():
    overlap = Overlap(["What is love?", "", "?!"], words=4)
    assert overlap.found_in("what is love")
    assert not overlap.found_in("Tell me: what is love?")
    assert not overlap.found_in("") and not overlap.found_in("!")


def test_openings_of_every_form(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a", "source": "somewhere"}\n\n{"turns": ["a", "b"], "question_id": 3}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}\n'
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}, '
        '{"role": "user", "content": "b"}]}\n'
    )
    system = {"role": "system", "content": "s"}
    expected = [Opening((USER,), ()), Opening((USER,), ("b",)), Opening((system, USER), ()), Opening((USER,), ("b",))]
    assert read_openings(path) == expected
    assert read_openings(path, 2) == expected[:2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("\udcff", "line 2 is not JSON"),
        ("3", "line 2 is of none of the forms"),
        ("[]", "line 2 is of none of the forms"),
        ('{"text": "a"}', "line 2 is of none of the forms"),
        ('{"prompt": 3}', "3 is not a text"),
        ('{"prompt": " "}', "' ' is not a text"),
        ('{"turns": []}', "line 2 is of none of the forms"),
        ('{"turns": "a"}', "turns are no list"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "unknown role 'tool'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no user's turn stands before the first answer"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "no user's turn stands before the first answer"),
        ('{"messages": [{"role": "user"}]}', "line 2 is of none of the forms"),
    ],
)
def test_a_malformed_prompt_is_named(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(ValueError, match=message):
        read_openings(path)


def test_a_file_without_prompts_is_an_error(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_openings(tmp_path / "empty.jsonl")


def test_all_texts_of_a_file_are_read(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"turns": ["a", "b"], "reference": [["c"]], "id": 3}\n["d"]\n')
    assert sorted(read_texts(path)) == ["a", "b", "c", "d"]
