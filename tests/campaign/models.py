"""Where: the models. Each is source text, what can be named in it, and what it has that a fault may need.

The loss is text too; `@name` in it is a point at which a fault may stand. `{call}` is the model's call.
"""

from dataclasses import dataclass

BLOCK = '''
class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=CAUSAL)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))
'''
VECTORS = '''
TEACHER = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))


def sample(number):
    """Inputs, and the labels that a fixed teacher gives them."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
    return x, (x @ TEACHER).argmax(-1)
'''
TOKENS = '''
def sample(number):
    """Texts that count in threes, and each token's next."""
    first = torch.randint(64, (8, 1), generator=torch.Generator().manual_seed(number))
    tokens = (first + 3 * torch.arange(13)) % 64
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
'''
CLASSIFY = """
logits = {call}.float()
@logits
loss = cross_entropy(logits, y)
"""
PREDICT = """
logits = {call}.float()
@logits
loss = cross_entropy(logits.flatten(0, 1), y.flatten())
"""


@dataclass(frozen=True)
class Model:
    """One architecture."""

    name: str
    source: str
    """Of the class `Net`."""
    data: str
    """Of `sample(number)`."""
    loss: str
    weights: tuple[str, ...]
    """Trained matrices, the ones that a fault may choose."""
    others: tuple[str, ...]
    """The other trained tensors."""
    layers: tuple[str, ...]
    """Modules with one tensor as output, in the order in which they are called, each before all of the next."""
    has: frozenset[str] = frozenset()
    frozen: tuple[str, ...] = ()
    setup: str = ""
    """After the model is made."""
    names: tuple[str, ...] = ()
    """What the script logs."""
    cuts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Layer -> what gets no gradient when its output is detached, by the beginning of its name."""

    @property
    def trained(self) -> tuple[str, ...]:
        """All trained tensors."""
        return (*self.weights, *self.others)


def _with_bias(*layers: str) -> tuple[str, ...]:
    return tuple(f"{layer}.bias" for layer in layers)


MLP = Model(
    "mlp",
    '''
class Net(nn.Module):
    """Two residual layers between an encoder and a head."""

    def __init__(self):
        super().__init__()
        self.encoder, self.norm = nn.Linear(16, 32), nn.BatchNorm1d(32)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.act1, self.act2, self.dropout = nn.ReLU(), nn.ReLU(), nn.Dropout(0.1)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = self.norm(self.encoder(x))
        x = x + self.act1(self.first(x))
        x = x + self.dropout(self.act2(self.second(x)))
        return self.head(x)
''',
    VECTORS,
    CLASSIFY,
    weights=("encoder.weight", "first.weight", "second.weight", "head.weight"),
    others=("norm.weight", *_with_bias("encoder", "norm", "first", "second", "head")),
    layers=("encoder", "norm", "first", "second", "head"),
    cuts=(("norm", ("encoder.", "norm.")), ("first", ("first.",)), ("second", ("second.",))),
    has=frozenset({"vectors", "labels", "batch_norm", "dropout", "pair", "relu"}),
)
GPT_BLOCKS = tuple(f"blocks.{number}.{name}" for number in (0, 1) for name in ("qkv", "out", "up", "down"))
GPT_NORMS = tuple(f"blocks.{number}.ln{which}" for number in (0, 1) for which in (1, 2))
GPT = Model(
    "gpt",
    BLOCK.replace("CAUSAL", "True")
    + '''

class Net(nn.Module):
    """A small GPT; positions come from a table of frequencies."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(64, 32), nn.Dropout(0.1)
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, 32, 2) / 32))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)

    def forward(self, tokens):
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), self.inv_freq.float())
        x = self.dropout(self.embedding(tokens) + torch.cat([angles.sin(), angles.cos()], -1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
''',
    TOKENS,
    PREDICT,
    weights=("embedding.weight", *(f"{layer}.weight" for layer in GPT_BLOCKS), "head.weight"),
    others=(*_with_bias(*GPT_BLOCKS, *GPT_NORMS, "norm"), *(f"{norm}.weight" for norm in (*GPT_NORMS, "norm"))),
    layers=("embedding", "blocks.0", "blocks.1", "norm", "head"),
    cuts=(
        ("embedding", ("embedding.",)),
        ("blocks.0", ("embedding.", "blocks.0.")),
        ("blocks.1.down", ("blocks.1.up.", "blocks.1.down.", "blocks.1.ln2.")),
    ),
    has=frozenset({"tokens", "labels", "dropout", "table", "generates"}),
)
VIT = Model(
    "vit",
    BLOCK.replace("CAUSAL", "False")
    + '''

class Net(nn.Module):
    """A small vision transformer."""

    def __init__(self):
        super().__init__()
        self.patches, self.position = nn.Conv2d(3, 32, 4, stride=4), nn.Parameter(0.02 * torch.randn(1, 4, 32))
        self.block, self.norm, self.head = Block(), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x):
        x = self.block(self.patches(x).flatten(2).transpose(1, 2) + self.position)
        return self.head(self.norm(x).mean(1))
''',
    '''
TEACHER = torch.randn(192, 4, generator=torch.Generator().manual_seed(5))


def sample(number):
    """Pictures, and the labels that a fixed teacher gives them."""
    x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(number))
    return x, (x.flatten(1) @ TEACHER).argmax(-1)
''',
    CLASSIFY,
    weights=("patches.weight", *(f"block.{name}.weight" for name in ("qkv", "out", "up", "down")), "head.weight"),
    others=(
        "position",
        *_with_bias(
            "patches", *(f"block.{name}" for name in ("qkv", "out", "up", "down", "ln1", "ln2")), "norm", "head"
        ),
        "block.ln1.weight",
        "block.ln2.weight",
        "norm.weight",
    ),
    layers=("patches", "block", "norm", "head"),
    cuts=(("block", ("patches.", "position", "block.")), ("block.out", ("block.qkv.", "block.out.", "block.ln1."))),
    has=frozenset({"vectors", "labels"}),
)
VQ = Model(
    "vq",
    '''
class Net(nn.Module):
    """Encoder, a codebook of 64, decoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.codebook = nn.Linear(16, 8), nn.Linear(8, 16), nn.Embedding(64, 8)
        nn.init.normal_(self.codebook.weight, std=0.5)

    def forward(self, x):
        latent = self.encoder(x)
        codes = torch.cdist(latent.detach().float(), self.codebook.weight.detach().float()).argmin(-1)
        quantised = self.codebook(codes)
        return self.decoder(latent + (quantised - latent).detach()), latent, quantised, codes
''',
    '''
def sample(number):
    """Vectors; there are no labels."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(number))
    return x, torch.zeros(64, dtype=torch.long)
''',
    """
restored, latent, quantised, codes = {call}
used = torch.bincount(codes, minlength=64)
@logits
terms = {{
    "restore": mse_loss(restored.float(), x),
    "codebook": mse_loss(quantised.float(), latent.detach().float()),
    "commit": 0.25 * mse_loss(latent.float(), quantised.detach().float()),
}}
@terms
loss = sum(terms.values())
log({{"{name_codebook_usage}": used, "loss_terms": terms}})
""",
    weights=("encoder.weight", "decoder.weight", "codebook.weight"),
    others=_with_bias("encoder", "decoder"),
    layers=("encoder", "decoder"),
    cuts=(("encoder", ("encoder.",)),),
    has=frozenset({"vectors", "codebook", "loss_terms", "logs"}),
    names=("codebook_usage",),
)
RNN = Model(
    "rnn",
    '''
class Net(nn.Module):
    """A recurrent network over twelve frames."""

    def __init__(self):
        super().__init__()
        self.inlet, self.recurrent, self.head = nn.Linear(16, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.recurrent(torch.tanh(self.inlet(x)))[0].mean(1))
''',
    '''
TEACHER = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))


def sample(number):
    """Sequences, and the labels that a fixed teacher gives them."""
    x = torch.randn(8, 12, 16, generator=torch.Generator().manual_seed(number))
    return x, (x.mean(1) @ TEACHER).argmax(-1)
''',
    CLASSIFY,
    weights=("inlet.weight", "recurrent.weight_ih_l0", "recurrent.weight_hh_l0", "head.weight"),
    others=("recurrent.bias_ih_l0", "recurrent.bias_hh_l0", *_with_bias("inlet", "head")),
    layers=("inlet", "head"),
    cuts=(("inlet", ("inlet.",)),),
    has=frozenset({"vectors", "labels", "frames"}),
)
TIED = Model(
    "tied",
    '''
class Net(nn.Module):
    """Embedding and head are one tensor."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.norm = nn.Embedding(64, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.act, self.head = nn.ReLU(), nn.Linear(32, 64, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.act(self.body(x))))
''',
    TOKENS,
    PREDICT,
    weights=("embedding.weight", "body.weight"),
    others=("norm.weight", *_with_bias("body", "norm")),
    layers=("body", "norm"),
    cuts=(("body", ("body.",)),),
    has=frozenset({"tokens", "labels", "generates"}),
)
LORA = Model(
    "lora",
    '''
class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, which begins at zero."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(4, 32) / 6), nn.Parameter(torch.zeros(32, 4))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


class Net(nn.Module):
    """A frozen trunk with adapters, and a head that is trained."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32).requires_grad_(False)
        self.first, self.second, self.head = Adapted(), Adapted(), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(torch.tanh(self.encoder(x)))))))
''',
    VECTORS,
    CLASSIFY,
    weights=("first.up", "second.up", "head.weight"),
    others=("first.down", "second.down", "head.bias"),
    layers=("first", "second", "head"),
    cuts=(("first", ("first.",)), ("second", ("first.", "second."))),
    has=frozenset({"vectors", "labels", "frozen", "adapter"}),
    frozen=tuple(
        f"{layer}.{kind}" for layer in ("encoder", "first.layer", "second.layer") for kind in ("weight", "bias")
    ),
)
POLICY = Model(
    "policy",
    '''
class Net(nn.Module):
    """Sixteen actions."""

    def __init__(self):
        super().__init__()
        self.body, self.inner, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)
        nn.init.normal_(self.head.weight, std=0.6)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(torch.tanh(self.body(x)))))
''',
    '''
TEACHER = torch.randn(16, 16, generator=torch.Generator().manual_seed(5))


def sample(number):
    """Situations, and the best action in each."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
    return x, (x @ TEACHER).argmax(-1)
''',
    """
logits = {call}.float().log_softmax(-1)
@logits
actions = torch.multinomial(logits.exp().detach(), 8, replacement=True, generator=draws)
sampled = logits.gather(1, actions).detach()
rewards = (actions == y[:, None]).float() + 0.1 * torch.rand(actions.shape, generator=draws)
@rewards
advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
@advantages
ratio = (logits.gather(1, actions) - sampled).exp()
with torch.no_grad():
    before = reference(x).float().log_softmax(-1)
kl = (logits.exp() * (logits - before)).sum(-1).mean()
entropy = -(logits.exp() * logits).sum(-1).mean()
terms = {{"policy": -(ratio * advantages).mean(), "kl": 0.05 * kl}}
@terms
loss = sum(terms.values())
log({{"{name_kl}": kl, "{name_entropy}": entropy, "vocabulary": 16, "{name_rewards}": rewards, "{name_advantages}": advantages, "{name_ratio}": ratio, "loss_terms": terms}})
""",
    weights=("body.weight", "inner.weight", "head.weight"),
    others=_with_bias("body", "inner", "head"),
    layers=("body", "inner", "head"),
    cuts=(("body", ("body.",)), ("inner", ("body.", "inner."))),
    has=frozenset({"vectors", "labels", "policy", "loss_terms", "logs", "reference"}),
    setup="""
reference = copy.deepcopy(net).requires_grad_(False).eval()
draws = torch.Generator().manual_seed(100 + rank)
""",
    names=("kl", "entropy", "rewards", "advantages", "ratio"),
)

MODELS = {model.name: model for model in (MLP, GPT, VIT, VQ, RNN, TIED, LORA, POLICY)}
