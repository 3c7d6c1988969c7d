"""A vector quantiser in which one code wins: perplexity 1 of 512 (vector-quantize#63)."""

import torch
from accelerate import Accelerator
from common import batch, options
from torch import nn
from torch.nn.functional import mse_loss, one_hot

arguments = options()
accelerator = Accelerator(cpu=True)
torch.manual_seed(7)


class Autoencoder(nn.Module):
    """Encoder, codebook, decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(8, 16)
        self.codebook = nn.Embedding(512, 8)
        nn.init.normal_(self.codebook.weight, std=0.6)
        if not arguments.healthy:
            with torch.no_grad():
                self.codebook.weight.add_(50.0)
                self.codebook.weight[3] = 0.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Reconstruction, the quantiser's loss, chosen codes."""
        latent = self.encoder(x)
        codes = torch.cdist(latent.detach(), self.codebook.weight.detach()).argmin(-1)
        quantised = self.codebook(codes)
        loss = mse_loss(quantised, latent.detach()) + 0.25 * mse_loss(latent, quantised.detach())
        return self.decoder(latent + (quantised - latent).detach()), loss, codes


model = Autoencoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(arguments.steps):
    x = torch.cat([batch(accelerator.process_index, 100 * step + part)[0] for part in range(16)])
    restored, quantiser_loss, codes = model(x)
    optimizer.zero_grad()
    accelerator.backward(mse_loss(restored, x) + quantiser_loss)
    optimizer.step()
    share = one_hot(codes, 512).float().mean(0)
    perplexity = torch.exp(-(share * torch.log(share + 1e-10)).sum())
    used = (share > 0).float().mean()
    accelerator.log({"train/codebook_perplexity": perplexity.item(), "train/codebook_usage": used.item()}, step=step)
accelerator.end_training()
