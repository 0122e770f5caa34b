"""Tiny training runs inside ranks: a corpus of our own, a config by keywords, and what each step found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from experiments.config import Config, DataConfig, MethodConfig, ModelConfig, TrainConfig
from experiments.data import Batches, Corpus, eval_batches, split
from experiments.step import TrainingStep, build_mesh, build_step

VOCAB = 23
# 13 training windows, the last of 7 tokens, so that padding comes up in many batches; odd, so ranks get uneven parts.
LENGTH = 61
SMALL = ModelConfig("small", hidden_size=32, layers=2, heads=4, kv_heads=2, ffn=40, vocab=VOCAB, rope_theta=100)


def make_config(method: str = "upipe", *, heads_per_stage: int | None = None, **values: Any) -> Config:
    """Return a config; `values` are fields of the model, the data or the training, by name."""
    parts: dict[str, Any] = {
        "model": SMALL,
        "data": DataConfig(source="numbers", sequence_length=LENGTH, batch_size=6, held_out_fraction=0.2),
        "train": TrainConfig(steps=30, warmup_steps=3, lr=1e-2, dtype="float64", clip=0.5),
    }
    for name, value in values.items():
        (part,) = [part for part, config in parts.items() if hasattr(config, name)]
        parts[part] = replace(parts[part], **{name: value})
    return Config(method=MethodConfig(method, heads_per_stage=heads_per_stage), **parts)


@cache
def corpus() -> Corpus:
    """Tokens that can be predicted from those before them, mostly, in documents of uneven length."""
    random = np.random.default_rng(0)
    tokens = random.integers(VOCAB, size=5 * (12 * LENGTH + 7) // 4)
    for i in range(2, len(tokens)):
        if random.random() < 0.8:
            tokens[i] = (tokens[i - 1] + 1) % VOCAB
    borders = np.unique([0, *random.integers(len(tokens), size=40), len(tokens)])
    return Corpus(tokens, borders, "numbers", has_documents=True)


@dataclass(frozen=True)
class Run:
    """A run in the making: its step and its stream of micro-batches."""

    config: Config
    step: TrainingStep
    loader: Batches
    shards: tuple[int, int]

    @classmethod
    def start(cls, config: Config) -> Run:
        mesh = build_mesh(config)
        shards = mesh["data"].size(), mesh["data"].get_local_rank()
        loader = Batches(split(corpus(), 0.2)[0], seed=config.train.seed, **cls._cut(config, shards))
        return cls(config, build_step(config, mesh), loader, shards)

    @staticmethod
    def _cut(config: Config, shards: tuple[int, int]) -> dict[str, Any]:
        data = config.data
        return {
            "sequence_length": data.sequence_length,
            "batch_size": data.batch_size // config.train.accumulation,
            "documents": data.documents,
            "num_shards": shards[0],
            "shard": shards[1],
        }

    def micro_batches(self) -> list[dict[str, Any]]:
        return [self.loader.next_batch() for _ in range(self.config.train.accumulation)]

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Return NLL and gradient norm of each step."""
        results = [self.step(self.micro_batches()) for _ in range(steps)]
        return [(result.nll, result.grad_norm) for result in results]

    def held_out_nll(self) -> float:
        return self.step.evaluate(eval_batches(split(corpus(), 0.2)[1], **self._cut(self.config, self.shards)))
