"""The vocabularies and chat formats of the demo models: Qwen 3's and Gemma 3's."""

import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
from make_chat import Messages
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

VOCAB_SIZE = 1024

Encode = Callable[[str], list[int]]
Segments = list[tuple[str, bool]]  # text, and whether it is the assistant's

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}"
    "{{ '<start_of_turn>user\\n[System: ' + message['content'] + ']<end_of_turn>\\n' }}"
    "{% else %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] + '<end_of_turn>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
# Qwen's own split: a word with the space before it, digits one by one, newlines apart.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def chatml_segments(messages: Messages) -> Segments:
    segments: Segments = []
    for message in messages:
        segments.append((f"<|im_start|>{message['role']}\n", False))
        segments.append((f"{message['content']}<|im_end|>", message["role"] == "assistant"))
        segments.append(("\n", False))
    return segments


def gemma_segments(messages: Messages) -> Segments:
    segments: Segments = [("<bos>", False)]
    for message in messages:
        system, assistant = (message["role"] == role for role in ("system", "assistant"))
        content = f"[System: {message['content']}]" if system else message["content"]
        segments.append((f"<start_of_turn>{'model' if assistant else 'user'}\n", False))
        segments.append((f"{content}<end_of_turn>", assistant))
        segments.append(("\n", False))
    return segments


def make_qwen_tokenizer(folder: Path, texts: list[str]) -> Encode:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = Split(Regex(QWEN_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(specials),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "bos_token": None,
            "add_bos_token": False,
            "model_max_length": 2048,
            "chat_template": CHATML_TEMPLATE,
        },
    )
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def make_gemma_tokenizer(folder: Path, texts: list[str]) -> Encode:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=itertools.chain.from_iterable(text.split("\n") for text in texts),
        model_writer=trained,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        unk_piece="<unk>",
        # <mask> is never used; without it, transformers adds one past the end of the embedding.
        user_defined_symbols=["<mask>", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n"],
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(trained.getvalue())
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "GemmaTokenizer",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "add_bos_token": True,
            "add_eos_token": False,
            "model_max_length": 2048,
            "chat_template": GEMMA_TEMPLATE,
        },
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())

    def encode(text: str) -> list[int]:
        # <bos> is a control symbol: SentencePiece never reads it from text.
        return [processor.bos_id()] if text == "<bos>" else processor.encode(text)

    return encode
