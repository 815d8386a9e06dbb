"""A small data set for the examples: additions as text, `12+7=19;`. Nothing to download."""

import torch

CHARACTERS = "0123456789+=; "
VOCAB_SIZE, SEQ_LEN = 16, 12


class Sums(torch.utils.data.Dataset):
    """All a+b with a, b below 100; every fiftieth is held out.

    A sample is `{"input_ids": (12,), "labels": (12,)}`, both int64. Labels are the next characters of the answer,
    and -100 elsewhere: two, three or four tokens of a row count.
    """

    def __init__(self, held_out=False):
        self.pairs = [(a, b) for a in range(100) for b in range(100) if ((7 * a + b) % 50 == 0) == held_out]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        a, b = self.pairs[index]
        question, answer = f"{a}+{b}=", f"{a + b};"
        ids = torch.tensor([CHARACTERS.index(c) for c in (question + answer).ljust(SEQ_LEN + 1)])
        labels = torch.full((SEQ_LEN,), -100)
        start = len(question) - 1
        labels[start : start + len(answer)] = ids[start + 1 : start + 1 + len(answer)]
        return {"input_ids": ids[:-1], "labels": labels}
