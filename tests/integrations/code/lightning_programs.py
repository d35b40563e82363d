"""LightningModules of the tests, as users would write them."""

from __future__ import annotations

import lightning
import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def samples(count, seed):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(count, 6)).astype(np.float32)
    return TensorDataset(torch.from_numpy(inputs), torch.from_numpy((inputs[:, 0] + inputs[:, 1] > 0).astype(np.int64)))


class Data(lightning.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        self.train, self.val = samples(64, 1), samples(27, 2)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)


class Classifier(lightning.LightningModule):
    """AdamW with groups, a schedule by the length of the run, metrics in every form."""

    def __init__(self, width=12, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))
        self.register_buffer("epochs_begun", torch.zeros(()))
        self.register_buffer("epochs_ended", torch.zeros(()))
        self.register_buffer("batches_ended", torch.zeros(()))
        self.train_acc = torchmetrics.Accuracy("multiclass", num_classes=2)
        self.val_acc = torchmetrics.Accuracy("multiclass", num_classes=2)
        self.auroc = torchmetrics.AUROC("binary")
        self.more = torchmetrics.MetricCollection(
            {"f1": torchmetrics.F1Score("binary"), "precision": torchmetrics.Precision("binary")}, prefix="val_"
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = functional.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.auroc.update(logits.softmax(1)[:, 1], y)
        self.more.update(logits.argmax(1), y)
        self.log("val_loss", functional.cross_entropy(logits, y), prog_bar=True, batch_size=len(x))
        self.log("val_acc", self.val_acc)
        self.log_dict(self.more)

    def on_train_epoch_start(self):
        self.epochs_begun += 1

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.batches_ended += 1

    def on_train_epoch_end(self):
        self.epochs_ended += self.current_epoch

    def on_validation_epoch_end(self):
        self.log("val_auroc", self.auroc.compute())
        self.auroc.reset()

    def configure_optimizers(self):
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], milestones=[2])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Plateau(Classifier):
    """A learning rate that follows a metric, and loaders of the module's own."""

    def setup(self, stage):
        self.train_set, self.val_set = samples(64, 1), samples(27, 2)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=8, shuffle=True, collate_fn=_pair)

    def val_dataloader(self):
        return [DataLoader(self.val_set, batch_size=8, collate_fn=_pair)]


class Recorder(lightning.Callback):
    """An own callback that writes down what its hooks get, with a state of attributes alone."""

    def __init__(self, folder=None):
        self.folder, self.calls, self.losses = folder, [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.calls.append(f"batch {trainer.current_epoch} {batch_idx} {trainer.global_step} {len(batch)}")

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.calls.append(f"validation batch of {dataloader_idx}")

    def on_train_epoch_end(self, trainer, pl_module):
        known = sorted(name for name in trainer.callback_metrics if "own" in name or "val_loss" in name)
        self.calls.append(f"epoch {trainer.current_epoch} {trainer.global_step} {known}")

    def on_train_end(self, trainer, pl_module):
        import json
        from pathlib import Path

        text = json.dumps({"calls": self.calls, "losses": self.losses})
        (Path(self.folder or trainer.default_root_dir) / "calls.json").write_text(text)


class TwoLoaders(Classifier):
    """Two validation loaders, and callbacks of the module's own."""

    def setup(self, stage):
        self.train_set, self.val_sets = samples(64, 1), [samples(27, 2), samples(9, 3)]

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return [DataLoader(self.val_sets[0], batch_size=8), DataLoader(self.val_sets[1], batch_size=4, collate_fn=_pair)]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        loss = functional.cross_entropy(self(x), y)
        self.log("val_loss", loss)
        self.log(f"own_{dataloader_idx}", x.mean(), add_dataloader_idx=False)
        if dataloader_idx == 1:
            self.val_acc(self(x), y)
            self.log("val_acc", self.val_acc)
        return loss

    def on_validation_epoch_end(self):
        pass

    def configure_callbacks(self):
        return [
            lightning.pytorch.callbacks.EarlyStopping("val_loss/dataloader_idx_1", patience=1, min_delta=0.5),
            lightning.pytorch.callbacks.ModelCheckpoint(monitor="val_loss/dataloader_idx_0", filename="best"),
            lightning.pytorch.callbacks.LearningRateMonitor(),
        ]


class Changing(lightning.Callback):
    """Changes the model on one worker."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        with torch.no_grad():
            pl_module.net[0].bias.clamp_(-1, 1)


def _pair(items):
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


class Regression(lightning.LightningModule):
    """No validation at all."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 2)

    def training_step(self, batch):
        x, y = batch
        return {"loss": functional.cross_entropy(self.net(x), y), "predictions": x}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(samples(32, 1), batch_size=8)


class Labelled(Regression):
    """Some samples have no target; the loss is a mean over those that have."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        known = x[:, 2] > 1
        return {"loss": functional.cross_entropy(self.net(x)[known], y[known]), "weight": known.sum()}

    def validation_step(self, batch):
        return self.training_step(batch, 0)

    def val_dataloader(self):
        return DataLoader(samples(32, 1), batch_size=8)


class Manual(Regression):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Stepping(Regression):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(optimizer_closure)


class Strategic(Regression):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch) if self.trainer.strategy is None else None


class Collecting(Regression):
    def __init__(self):
        super().__init__()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        self.outputs.append(batch_idx)
        return super().training_step(batch)


class Largest(Regression):
    def training_step(self, batch, batch_idx):
        self.log("largest", batch[0].max(), reduce_fx="max")
        return super().training_step(batch)


class Weighted(Regression):
    def train_dataloader(self):
        sampler = torch.utils.data.WeightedRandomSampler([1.0] * 32, 32)
        return DataLoader(samples(32, 1), batch_size=8, sampler=sampler)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(samples(32, 1))


class Streaming(Regression):
    def train_dataloader(self):
        return DataLoader(Stream(), batch_size=8)
