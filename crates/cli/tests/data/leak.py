"""A small training with a planted leak."""
import sys
import torch
from torch import nn
import torch.nn.functional as F

kept = []

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self, width=256, depth=4):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def remember(loss, x):
    kept.append(x.detach().float().clone())

def train(model, optimizer, steps):
    for step in range(steps):
        tokens = torch.randint(0, 1000, (16, 128), device="cuda")
        optimizer.zero_grad(set_to_none=True)
        out = model(tokens)
        loss = F.cross_entropy(out.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        remember(loss, out[:2])

def main():
    kind = sys.argv[1]
    if kind == "all":
        torch.cuda.memory._record_memory_history()
    else:
        torch.cuda.memory._record_memory_history(stacks="python")
    torch.manual_seed(0)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 10)
    torch.cuda.synchronize()
    torch.cuda.memory._dump_snapshot(sys.argv[2])

main()
