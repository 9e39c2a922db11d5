"""Write a Llama folder with a SentencePiece vocabulary as a GGUF model for llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import safetensors.numpy
import sentencepiece


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows in the order of llama.cpp's LlamaModel.permute.

    In a head of d rows, row i of the first half moves to 2 i, row i of the second half to 2 i + 1.
    """
    size = len(rows) // heads
    order = [
        head * size + (row // 2 if row % 2 == 0 else size // 2 + row // 2)
        for head in range(heads)
        for row in range(size)
    ]
    return rows[order]


def write_base_gguf(folder: Path, vocabulary: Path, target: Path) -> Path:
    """Write a folder's float32 model in the format of llama.cpp's convert_hf_to_gguf.py."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(vocabulary))
    ids = range(len(pieces))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([pieces.id_to_piece(each).encode() for each in ids])
    writer.add_token_scores([pieces.get_score(each) for each in ids])
    kinds = gguf.TokenType
    writer.add_token_types(
        [
            kinds.UNKNOWN
            if pieces.is_unknown(each)
            else kinds.CONTROL
            if pieces.is_control(each)
            else kinds.BYTE
            if pieces.is_byte(each)
            else kinds.NORMAL
            for each in ids
        ]
    )
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, tensor in safetensors.numpy.load_file(folder / "model.safetensors").items():
        if name == "lm_head.weight":  # equal to the embeddings
            continue
        if name.endswith("q_proj.weight"):
            tensor = interleaved(tensor, heads)
        if name.endswith("k_proj.weight"):
            tensor = interleaved(tensor, kv_heads)
        known = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(known, np.ascontiguousarray(tensor.astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
