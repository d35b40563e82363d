"""A training loop of one's own: handwritten digits, with a warm-up, clipping and an evaluation after each epoch.

python examples/script/train.py
ephemeron train examples/script/train.py --workers 4 -- --epochs 5
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

import ephemeron


def evaluate(model, tests):
    """Loss and accuracy on the test set."""
    model.eval()
    with torch.no_grad():
        images, labels = tests.dataset[tests.indices]
        scores = model(images)
    model.train()
    return functional.cross_entropy(scores, labels), (scores.argmax(1) == labels).float().mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    training, testing = random_split(TensorDataset(images, labels), [0.8, 0.2])
    loader = DataLoader(training, batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)

    run = ephemeron.current()
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(options.epochs):
        for inputs, targets in run.steps(loader):
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            run.step(optimizer, loss, clip_norm=1.0)
            scheduler.step()
        test_loss, accuracy = evaluate(model, testing)
        run.log(loss=test_loss, accuracy=accuracy)
        if run.is_main:
            print(f"epoch {epoch + 1}: loss {test_loss:.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
