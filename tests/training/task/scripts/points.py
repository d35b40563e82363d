"""A training loop as people write it: epochs, a schedule, dropout, augmentation, clipping, evaluation after each epoch."""

import argparse
import json

import numpy as np
import torch
from shapes import Points
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import ephemeron


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--flat", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.0 if options.no_dropout else 0.2), nn.LayerNorm(16), nn.Linear(16, 3))
    if options.double:
        model = model.double()
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=18)
    data, tests = Points(90, noisy=True), Points(30, seed=5)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    run = ephemeron.current()
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    losses = []

    def train(batch):
        inputs, targets = batch
        loss = functional.cross_entropy(model(inputs.to(dtype)), targets)
        loss.backward()
        run.step(optimizer, loss, clip_norm=1.0, accuracy=(model(inputs.to(dtype)).argmax(-1) == targets).float().mean())
        scheduler.step()
        losses.append(loss.item())

    def evaluate():
        model.eval()
        with torch.no_grad():
            inputs, targets = map(torch.stack, zip(*((x, y) for x, y in (tests[i] for i in range(len(tests)))), strict=True))
            output = model(inputs.to(dtype))
            run.log(loss=functional.cross_entropy(output, targets), accuracy=(output.argmax(-1) == targets).double().mean())
        model.train()

    if options.flat:
        for batch in run.steps(loader, epochs=options.epochs):
            train(batch)
        evaluate()
    else:
        for _ in run.epochs(options.epochs):
            for batch in run.steps(loader):
                train(batch)
            evaluate()
    if options.out:
        np.savez(options.out, **{n: t.numpy() for n, t in model.state_dict().items()})
        with open(options.out + ".json", "w") as file:
            json.dump(losses, file)


if __name__ == "__main__":
    main()
