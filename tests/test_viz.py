"""Seeing drafts: colours change no text, watching changes no tokens, pictures can be read and take any token."""

import dataclasses
import io
import itertools
import sys

import matplotlib
import numpy as np
import pytest
from engine_rig import TREE, Oracle, make_head, make_target, random_prompts
from rich.color import Color
from rich.console import Console
from rich.style import Style

import eagle_jax as ej
from eagle_jax import viz
from eagle_jax.tree import NO_PARENT, Tree

matplotlib.use("Agg")

PIECES = (b"a", b" b", b"\n", b"\xc3", b"\xa9", b"$x$", b"_", b"\xf0\x9f", b"\x98\x80", "你".encode())
PIECES += (b"\\", b"{", b"long word of a token", b"\t", b"e", b"")
END = 15


class Bytes:
    """Sixteen tokens of a few bytes, two of which it takes to make some characters; the last one is a marker."""

    bos_token = None

    def decode(self, ids, skip_special_tokens=False):
        pieces = (b"<end>" if token == END and not skip_special_tokens else PIECES[token] for token in ids)
        return b"".join(pieces).decode("utf-8", errors="replace")


@pytest.fixture(scope="module")
def target():
    return dataclasses.replace(make_target(), tokenizer=Bytes())


@pytest.fixture(scope="module")
def head(target):
    return make_head(target)


def options_of(seed: int, **others) -> dict:
    return {"max_new_tokens": 32, "sampling": ej.SamplingConfig(temperature=1.5), "tree": TREE, "seed": seed} | others


# --- Text in colour ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["limit", "eos", "stop"])
def test_colours_change_no_character(target, head, cut):
    prompts = random_prompts(3)
    stop = ["$x", "b\ufffd"] if cut == "stop" else None
    if cut == "eos":
        target = dataclasses.replace(target, eos_token_ids=(END,))
    for limit in (1, 17, 18, 19, 20):
        for done in ej.generate(target, head, prompts, **options_of(3, stop=stop, max_new_tokens=limit)):
            assert viz.colored(target, done).plain == done.text


def test_each_character_has_the_style_of_the_token_that_completes_it(target):
    done = ej.Completion(
        token_ids=[0, 3, 4, 7, 8, 9, 5],
        text="aé😀你$x$",
        logprobs=[0.0] * 7,
        finish_reason="length",
        rounds=2,
        accepted=[2, 4],  # the last round was cut
    )
    assert viz.levels_of(done) == [0, 1, 2, 0, 1, 2, 3]
    painted = viz.colored(target, done)
    styles = {painted.plain[span.start : span.end]: span.style for span in painted.spans}
    assert styles == {"é": viz.style_of(2), "😀": viz.style_of(1), "你": viz.style_of(2), "$x$": viz.style_of(3)}


def test_a_text_that_ends_within_a_character_keeps_what_stands_for_it(target):
    done = ej.Completion(
        token_ids=[0, 3], text="a\ufffd", logprobs=[0.0] * 2, finish_reason="length", rounds=1, accepted=[0]
    )
    assert viz.colored(target, done).plain == "a\ufffd"


@pytest.mark.parametrize("stop", [None, ["$x$", "b a"]])
def test_a_stream_in_colour_is_the_text_in_colour(target, head, stop):
    for seed in range(4):
        options = options_of(seed, stop=stop)
        whole = viz.colored(target, ej.generate(target, head, [1, 2, 3], **options))
        paint = viz.Painter(target)
        painted = [paint(chunk) for chunk in ej.stream(target, head, [1, 2, 3], **options)]
        assert "".join(text.plain for text in painted) == whole.plain
        letters = [text.get_style_at_offset(Console(), i) for text in painted for i in range(len(text))]
        assert letters == [whole.get_style_at_offset(Console(), i) for i in range(len(whole))]


def test_a_console_shows_chunks_as_they_are(target):
    out = io.StringIO()
    console = Console(file=out, width=20)
    paint = viz.Painter(target)
    for token in (12, 2, 2, 1, 0, 1, 12, 1, 2):
        text = PIECES[token].decode()
        chunk = ej.Chunk(text=text, token_ids=[token], accepted=0, finish_reason=None)
        console.print(paint(chunk), end="", soft_wrap=True)
    assert out.getvalue() == "long word of a token\n\n ba blong word of a token b\n"


def test_a_chunk_costs_no_more_late_in_a_stream_than_early(target):
    paint, chunk = viz.Painter(target), ej.Chunk(text="a b", token_ids=[0, 1], accepted=1, finish_reason=None)

    def steps() -> int:
        """Lines that painting one chunk runs."""
        lines, before = [], sys.gettrace()

        def trace(frame, event, argument):
            lines.append(event)
            return trace

        sys.settrace(trace)
        try:
            paint(chunk)
        finally:
            sys.settrace(before)
        return len(lines)

    early = [steps() for _ in range(8)][-1]
    for _ in range(200):
        paint(chunk)
    assert steps() == early


def test_without_a_tokenizer_there_is_nothing_to_colour():
    target = make_target()
    assert viz.colored(target, ej.generate(target, None, [1], max_new_tokens=4)).plain == ""


def test_styles_can_be_read_on_black_and_on_white_and_told_apart_without_colour():
    def luminance(color: Color) -> float:  # WCAG 2, relative luminance
        channels = np.array(color.get_truecolor()) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    for style in map(Style.parse, viz.DRAFTED):
        assert style.color is not None and style.underline
        light = luminance(style.color)
        assert min(1.05 / (light + 0.05), (light + 0.05) / 0.05) >= 4.5
    assert all(str(level) in viz.legend().plain for level in range(1, len(viz.DRAFTED) + 1))


# --- Round by round ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 1}, {"stop": ["a"]}])
def test_watching_gives_generates_tokens(target, head, options):
    options = options_of(5, **options)
    done = ej.generate(target, head, [4, 5, 6], **options)
    rounds = list(viz.watch(target, head, [4, 5, 6], **options))
    assert len(rounds) == done.rounds
    if rounds:
        assert rounds[-1].completion == done and rounds[-1].text == done.text
    told = done.token_ids[:1]
    for watched, accepted in zip(rounds, done.accepted, strict=True):
        tree = watched.tree
        assert tree.tokens.shape == (TREE.nodes,) and tree.tokens[0] == told[-1]
        assert len(watched.path) == len(watched.tokens) == accepted + 1
        # The path leads down the tree, over the tokens that the target chose.
        for parent, node, token in zip(watched.path, watched.path[1:], watched.tokens, strict=False):
            assert tree.parents[node] == parent and tree.tokens[node] == token
        told += watched.tokens
        assert done.text.startswith(watched.text)
    assert told[: len(done.token_ids)] == done.token_ids


def test_watching_refuses_senseless_options_at_once(target, head):
    with pytest.raises(ValueError, match="prompt is empty"):
        viz.watch(target, head, [])


# --- Pictures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pyplot():
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def boxes_of(ax) -> list:
    ax.figure.draw_without_rendering()
    renderer = ax.figure.canvas.get_renderer()
    return [text.get_bbox_patch().get_window_extent(renderer) for text in ax.texts]


def test_labels_of_sixty_nodes_do_not_meet(target, head, pyplot):
    tree = ej.TreeConfig(nodes=60, depth=6, top_k=10)
    prompt = random_prompts(1)[0]
    for watched in itertools.islice(viz.watch(target, head, prompt, **options_of(0, tree=tree)), 3):
        ax = viz.draw_tree(watched, target)
        boxes = boxes_of(ax)
        assert len(boxes) == 61  # and the bonus token
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        inside = ax.figure.bbox
        assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes)
        assert all(box.y0 >= ax.get_legend().get_window_extent().y1 and box.y1 <= inside.y1 for box in boxes)


def test_the_path_and_the_bonus_token_stand_out(target, pyplot):
    truth = ej.generate(target, None, [1, 2, 3], max_new_tokens=12).token_ids
    watched = next(viz.watch(target, Oracle([truth]), [1, 2, 3], max_new_tokens=12, tree=ej.TreeConfig(depth=3)))
    ax = viz.draw_tree(watched, target)
    assert [text.get_text() for text in ax.texts] == [viz.label_of(target, token) for token in truth[:5]]
    assert all(text.get_fontweight() == "bold" for text in ax.texts)
    assert [text.get_bbox_patch().get_linestyle() for text in ax.texts] == ["-"] * 4 + ["--"]


def test_padding_is_not_drawn_and_a_bare_tree_is(target, pyplot):
    tree = Tree(
        tokens=np.array([[0, 1, 2, 7]]),
        parents=np.array([[NO_PARENT, 0, 1, NO_PARENT]]),
        depths=np.array([[0, 1, 2, 0]]),
        log_scores=np.array([[0.0, -0.1, -np.inf, 0.0]]),
    )
    ax = viz.draw_tree(tree, target)
    assert [text.get_text() for text in ax.texts] == ["a", "␣b", "\\n"]
    assert ax.get_legend() is None
    axes = pyplot.subplots()[1]
    assert viz.draw_tree(tree, target, ax=axes) is axes


def test_any_token_can_be_drawn(target, pyplot):
    """Dollars are no formula, and what the font lacks is escaped; warnings are errors here."""
    count = len(PIECES)
    tree = Tree(
        tokens=np.arange(count),
        parents=np.array([NO_PARENT] + [0] * (count - 1)),
        depths=np.minimum(np.arange(count), 1),
        log_scores=-np.arange(count, dtype=np.float32),
    )
    ax = viz.draw_tree(tree, target)
    boxes_of(ax)
    labels = [text.get_text() for text in ax.texts]
    assert labels[5:7] == ["$x$", "_"] and labels[9] == "\\u4f60" and labels[12] == "long␣word␣of␣a␣…"
    assert all(label.isprintable() for label in labels)
    assert viz.label_of(make_target(), 7) == "7"


def test_without_matplotlib_a_picture_is_refused_with_what_to_do(target, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    tree = Tree(tokens=np.zeros(1), parents=np.full(1, NO_PARENT), depths=np.zeros(1), log_scores=np.zeros(1))
    with pytest.raises(ImportError, match="run pip install"):
        viz.draw_tree(tree, target)


def test_a_space_at_the_beginning_of_a_token_is_seen_though_the_tokenizer_drops_it(target):
    class Trimmed(Bytes):
        def decode(self, ids, skip_special_tokens=False):
            return super().decode(ids, skip_special_tokens).removeprefix(" ")

    assert viz.label_of(dataclasses.replace(target, tokenizer=Trimmed()), 1) == "␣b"


@pytest.mark.slow
def test_the_embedded_model_in_colour_and_drawn(smollm2, pyplot):
    head = ej.load_head("smollm2-135m", smollm2)
    rounds = list(viz.watch(smollm2, head, "It costs $5 or £4: 你好 😀 and", max_new_tokens=12, tree=TREE))
    done = rounds[-1].completion
    assert viz.colored(smollm2, done).plain == done.text
    boxes_of(viz.draw_tree(rounds[0], smollm2))
