"""Changes that are wrong on purpose: none may ever be given a time."""

import torch.nn.functional as F


def scaled_gradient(trial):
    """One parameter's gradient is half as large again."""

    def change(model):
        next(iter(model.parameters())).register_hook(lambda gradient: 1.5 * gradient)

    trial.on_first_call.append(change)


def dropped_mask(trial):
    """Attention sees the future."""
    original = F.scaled_dot_product_attention

    def unmasked(query, key, value, is_causal=False):
        return original(query, key, value)

    F.scaled_dot_product_attention = unmasked


def lost_token(trial):
    """The loss that is joined with its head lacks the last token."""
    from trainstep.ladder.places.head_loss import HeadLoss

    class Losing(HeadLoss):
        def _loss(self, product, states, ids, options):
            return super()._loss(product, states[:-1], ids[:-1], options)

    trial.on_first_call.append(Losing(lambda line, how: None).see_model)


def faster_updates(trial):
    """A learning rate that is a twentieth larger."""
    import torch

    original = torch.optim.AdamW.__init__

    def __init__(self, params, lr=1e-3, **more):
        original(self, params, lr=1.05 * lr, **more)

    torch.optim.AdamW.__init__ = __init__
