"""A byte-level BPE tokenizer of 262 tokens, with the tokenizers library alone: tests that need no model import no torch."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MERGES = [("y", "e"), ("ye", "s"), ("\u0120", "yes"), ("n", "o"), ("\u0120", "no")]


def byte_tokenizer() -> Tokenizer:
    """256 bytes, then <|end|>, then the merges that make ' yes' and ' no' one token each."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    vocab["<|end|>"] = 256
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class LightTokenizer:
    """What rendering needs of a tokenizer, without transformers."""

    eos_token_id = 256

    def __init__(self):
        self.backend_tokenizer = byte_tokenizer()

    def encode(self, text, *, add_special_tokens):
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def __call__(self, text, *, add_special_tokens, return_offsets_mapping):
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}
