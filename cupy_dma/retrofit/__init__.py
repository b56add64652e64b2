"""Retrofit: train the gates of a pretrained model, so that it keeps fewer keys.

    cupy_dma.transformers.convert(model, policy="gate")
    cupy_dma.retrofit.train(model, batches, steps=500, ratio=8)

The model with gates learns to predict what the model without them predicts, while the share of keys that its gates keep
must fall. The parts, for a custom loop:

    objective = Distillation(model)                         # both forward passes, and the losses
    target = kept_target(step, steps=500, ratio=8)          # 1 at first, 1/8 at the end
    losses = objective(input_ids, target=target)
    losses.loss.backward()

Importing this module imports torch, not transformers.
"""
from cupy_dma.retrofit.budgets import capacities
from cupy_dma.retrofit.distillation import Distillation, Losses, gates_of, open_gates
from cupy_dma.retrofit.losses import Head, budget_loss, chunked_kl
from cupy_dma.retrofit.training import kept_target, train

__all__ = ["Distillation", "Head", "Losses", "budget_loss", "capacities", "chunked_kl", "gates_of", "kept_target",
           "open_gates", "train"]
