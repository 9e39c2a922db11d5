"""Laws of tokens and mask for any conversation, and of the ledger for any limit."""

from __future__ import annotations

from itertools import accumulate, groupby
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.data.template import TEMPLATES, RenderedText
from tests.core.data.encoding import (
    TOKENIZERS,
    ByteTokenizer,
    converse,
    encode,
    supervised_runs,
)

CONTENT = st.text(st.sampled_from("ab \né🦙\u0301<|>"), max_size=8) | st.text(max_size=8)
TURNS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "assistant", "tool"]), CONTENT),
    max_size=5,
)
# Like every row that is read, each conversation has an assistant turn.
CONVERSATIONS = st.lists(
    st.builds(
        lambda before, answer, after: [*before, ("assistant", answer), *after],
        TURNS,
        CONTENT,
        TURNS,
    ),
    max_size=5,
)


def may_be_one_example(tokenizer: Any, rendered: RenderedText) -> bool:
    """Return whether the tokens begin with each prompt's, and no token crosses an answer's end."""
    texts = [rendered.text, *(rendered.text[:start] for start, _ in rendered.spans)]
    whole, *prompts = (encoded.ids for encoded in tokenizer.encode_batch(texts))
    lengths = [
        1 if isinstance(tokenizer, ByteTokenizer) else len(tokenizer.decode([token]).encode())
        for token in whole
    ]
    edges = set(accumulate(lengths))
    return all(whole[: len(prompt)] == prompt for prompt in prompts) and all(
        len(rendered.text[:end].encode()) in edges for _, end in rendered.spans
    )


@settings(deadline=None)
@given(
    chosen=st.sampled_from(sorted(TOKENIZERS)),
    template=st.sampled_from(sorted(TEMPLATES)),
    bos=st.sampled_from([None, "<bos>"]),
    turns=CONVERSATIONS,
)
def test_supervised_tokens_decode_to_the_answers_for_any_conversation(
    chosen: str, template: str, bos: str | None, turns: list[list[tuple[str, str]]]
) -> None:
    tokenizer = TOKENIZERS[chosen](bos, None)
    conversations = {i: converse(*messages, row=i) for i, messages in enumerate(turns, start=1)}

    examples, _, skipped = encode(tokenizer, *conversations.values(), template=template)

    for row, of_row in groupby(examples, key=lambda example: example.row):
        (rendered,) = TEMPLATES[template](conversations[row]).texts
        several = list(of_row)
        answers = [rendered.text[start:end] for start, end in rendered.spans]
        prompts = [
            encoded.ids
            for encoded in tokenizer.encode_batch([rendered.text[:a] for a, _ in rendered.spans])
        ]
        for example in several:
            if bos is not None:
                assert example.tokens[0] == tokenizer.bos_id
                assert example.assistant_mask[0] == 0
        tokens = [example.tokens.tolist()[bos is not None :] for example in several]
        runs = [supervised_runs(example) for example in several]
        if may_be_one_example(tokenizer, rendered):
            ((whole,), (of_whole,)) = tokens, runs
            assert tokenizer.decode(whole) == rendered.text
            assert all(whole[: len(prompt)] == prompt for prompt in prompts)
            assert [tokenizer.decode(run) for run in of_whole] == answers
        else:
            for ids, of_turn, prompt, answer in zip(tokens, runs, prompts, answers, strict=True):
                (run,) = of_turn
                assert ids == prompt + run
                assert tokenizer.decode(run) == answer
    refused = [
        row
        for row, conversation in conversations.items()
        if template == "gemma" and any(m.role == "tool" for m in conversation.messages)
    ]
    assert {example.row for example in examples} == conversations.keys() - refused
    assert skipped.total == len(refused)


@settings(deadline=None)
@given(
    chosen=st.sampled_from(sorted(TOKENIZERS)),
    bos=st.sampled_from([None, "<bos>"]),
    turns=CONVERSATIONS,
    max_seq_len=st.integers(2, 80),
)
def test_ledger_adds_up_and_a_cut_is_a_prefix_for_any_limit(
    chosen: str, bos: str | None, turns: list[list[tuple[str, str]]], max_seq_len: int
) -> None:
    tokenizer = TOKENIZERS[chosen](bos, None)
    conversations = [converse(*messages, row=i) for i, messages in enumerate(turns, start=1)]
    whole, _, _ = encode(tokenizer, *conversations)

    examples, ledger, skipped = encode(tokenizer, *conversations, max_seq_len=max_seq_len)

    kept = [example for example in whole if example.assistant_mask[:max_seq_len].any()]
    assert [example.row for example in examples] == [example.row for example in kept]
    for cut, full in zip(examples, kept, strict=True):
        assert cut.tokens.tolist() == full.tokens[:max_seq_len].tolist()
        assert cut.assistant_mask.tolist() == full.assistant_mask[:max_seq_len].tolist()
    masks = [example.assistant_mask[:max_seq_len].tolist() for example in kept]
    lengths = [len(example) for example in whole]
    rows = {example.row for example in kept}
    assert ledger.rows_read == len(conversations) == len(rows) + skipped.total
    assert ledger.rows_train == len(rows)
    assert ledger.examples == len(kept)
    assert ledger.rows_truncated == len({e.row for e in whole if len(e) > max_seq_len})
    assert ledger.tokens == sum(lengths)
    assert ledger.tokens_supervised == sum(map(sum, masks))
    assert ledger.tokens_context == sum(map(len, masks)) - sum(map(sum, masks))
    assert ledger.adds_up()
