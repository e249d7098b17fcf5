"""Language models of the package transformers from a local folder: config.json and *.safetensors.

No model hub is asked, no code of the folder runs, and no pickle is read. A network is built without numbers; where a
run puts its tensors in, the files are not read. The network gets tokens, (B, T), or three planes, (B, 3, T): tokens,
the document that each place belongs to, -1 for padding, and its position in the document. A place then sees the places
of its own document alone, and padding sees itself, by a mask of the scores that is made here: masks of transformers
branch on their values, which `torch.func.vmap` cannot do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..files.cache import first_line
from ..stateless import parameters_of
from ..workload import WITHOUT_STORED, WITHOUT_WEIGHTS, Model, Params
from .head import WITHOUT_HEAD, Head
from .narrow import as_held, computes_in, is_linear
from .stored import CODES, ONE, Place, StoredTensors, headers

CONFIG = "config.json"
OF_TOKENS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""The files of a tokeniser that a model is published with, where its folder has them."""
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier_scale")
"""The settings by which some architectures multiply or divide logits."""
SHOWN = 4
"""The largest number of names in a message."""


def transformers() -> Any:
    """The package, which is told to ask no hub before it is imported. Raises ValueError if it cannot be imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        import transformers  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ValueError('pretrained needs the package transformers; run: pip install "fedfleet[text]"') from error
    return transformers


def few(names: Sequence[str]) -> str:
    """Names for a message."""
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


@contextmanager
def without_progress() -> Iterator[None]:
    """A context in which transformers shows no bars of progress."""
    logging = transformers().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def renamed(network: Any, there: Mapping[str, Place]) -> dict[str, Place]:
    """Tensors of files by the names that transformers gives them where it only renames them."""
    from transformers.conversion_mapping import (  # pyright: ignore[reportMissingImports]
        get_model_conversion_mapping,
    )
    from transformers.core_model_loading import (  # pyright: ignore[reportMissingImports]
        WeightRenaming,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(network)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    others: Any = [each for each in mapping if not isinstance(each, WeightRenaming)]
    pairs = {name: rename_source_key(name, renamings, others) for name in there}
    return {name if converted else new: there[name] for name, (new, converted) in pairs.items()}


class Seen:
    """What an adapted class of transformers has beside its own forward."""

    config: Any

    def given(self, x: Tensor, causal: bool) -> dict[str, Any]:
        """The arguments of the class's own forward. x: (B, T) or (B, 3, T), see the module."""
        if x.ndim == 2:
            return {"input_ids": x, "use_cache": False} if causal else {"input_ids": x}
        tokens, document, position = x.unbind(1)
        network: Any = self
        mask = additive_mask(document, causal, computes_in(network.get_input_embeddings()))
        more = {"position_ids": position, "use_cache": False} if causal else {}
        return {"input_ids": tokens, "attention_mask": mask, **more}


def additive_mask(document: Tensor, causal: bool, dtype: torch.dtype) -> Tensor:
    """(B, 1, T, T): what is added to scores: 0 where a place sees another one, the lowest number elsewhere. document:
    (B, T), see the module."""
    places = torch.arange(document.shape[-1], device=document.device)
    seen = (document.unsqueeze(-1) == document.unsqueeze(-2)) & (document >= 0).unsqueeze(-1)
    if causal:
        seen = seen & (places.unsqueeze(-1) >= places)
    seen = seen | (places.unsqueeze(-1) == places)
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype).unsqueeze(1)


class Causal(Seen):
    """tokens -> logits (B, T, vocabulary) of the token behind each place."""

    def forward(self, x: Tensor) -> Tensor:
        if WITHOUT_HEAD.get():
            network: Any = self
            return network.base_model(**self.given(x, causal=True)).last_hidden_state
        return super().forward(**self.given(x, causal=True)).logits  # pyright: ignore[reportAttributeAccessIssue]

    def last_layer(self) -> Head | None:
        """What makes logits of the hidden states; None where that is more than a linear layer and a cap."""
        network: Any = self
        layer = network.get_output_embeddings()
        scaled = any(getattr(self.config, name, None) not in (None, 1, 1.0) for name in SCALES)
        if not is_linear(layer) or scaled:
            return None
        return Head(as_held(layer, "weight"), layer.bias, getattr(self.config, "final_logit_softcapping", None))


class Classifier(Seen):
    """tokens -> logits (B, classes), of an encoder."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(**self.given(x, causal=False)).logits  # pyright: ignore[reportAttributeAccessIssue]


class CausalClassifier(Seen):
    """tokens -> logits (B, classes), of a decoder: those of the last place that is not padding."""

    def forward(self, x: Tensor) -> Tensor:
        network: Any = self
        hidden = network.base_model(**self.given(x, causal=True)).last_hidden_state
        last = torch.full_like(x[:, 0], x.shape[-1] - 1) if x.ndim == 2 else (x[:, 1] >= 0).sum(-1) - 1
        at = last.view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
        return network.score(hidden.gather(1, at).squeeze(1))


@dataclass(frozen=True)
class Pretrained(Model):
    """A language model of the package transformers (`pip install "fedfleet[text]"`) from a local folder.

    `folder`: with config.json and *.safetensors, as `save_pretrained` writes them. `head`: causal, for the next token,
    or classify, for the class of a text; a head that the files do not have is drawn. `attention`: transformers' name of
    the implementation; eager runs for several clients at once. `dropout`: the rate of all its layers of dropout in
    training, in the place of those in config.json. `train`: patterns of the parameters that are trained, all by
    default; an `adapter` has such patterns of its own.
    """

    folder: str
    head: Literal["causal", "classify"] = "causal"
    attention: str = "eager"
    dropout: float = 0.0
    train: tuple[str, ...] = ("*",)

    of_package: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"0 <= dropout < 1 must hold, got dropout={self.dropout}")

    @property
    def path(self) -> Path:
        """The folder. Raises ValueError if there is none."""
        path = Path(self.folder).expanduser()
        if not path.is_dir():
            raise ValueError(
                f"folder: there is no folder {self.folder}; runs never ask a model hub, so give a local folder with "
                f"{CONFIG} and *.safetensors"
            )
        return path

    def files(self) -> Mapping[str, Path]:
        path = self.path
        return {file.name: file for file in [path / CONFIG, *sorted(path.glob("*.safetensors"))]}

    def settings(self) -> dict[str, Any]:
        """What config.json says. Raises ValueError for a folder that a run does not read."""
        path = self.path
        try:
            found = json.loads((path / CONFIG).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"folder: {path} must have a readable {CONFIG}, got {error}") from error
        if not [*path.glob("*.safetensors")]:
            pickled = next(iter(sorted([*path.glob("*.bin"), *path.glob("*.pt")])), None)
            has = f"{pickled.name} but no" if pickled else "no"
            raise ValueError(
                f"folder: {path} has {has} *.safetensors; pickled weights can run code, so convert them first "
                "(safetensors.torch.save_file)"
            )
        if (path / "adapter_config.json").exists():
            raise ValueError(
                f"folder: {path} has adapter_config.json, which names another base; give the folder of that base, and "
                "the factors with adapter: {name: lora, factors: …}"
            )
        if "auto_map" in found:
            raise ValueError(
                f"folder: {CONFIG} has auto_map, which runs code of the folder; use an architecture that transformers "
                "has"
            )
        if "quantization_config" in found:
            how = found["quantization_config"].get("quant_method", "unknown")
            raise ValueError(
                f"folder: {CONFIG} has quantization_config ({how}); give a folder in float32, bfloat16 or float16"
            )
        return found

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        if len(shape) not in (1, 2):
            raise ValueError(f"pretrained needs tokens (length,), got shape={shape}; choose it for texts")
        self.settings()
        kind, config = self.kind_and_config(classes)
        self.check(config, shape[-1], classes)
        if WITHOUT_WEIGHTS.get() or torch.get_default_device().type == "meta":
            network = self.without_numbers(kind, config)
            if not WITHOUT_WEIGHTS.get():
                self.check_headers(network, kind.__name__)
        elif WITHOUT_STORED.get() and (stored := self.stored(shape, classes)) is not None:
            network = self.without_numbers(kind, config)
            self.draw(network, [name for name in parameters_of(network) if name not in stored])
        else:
            network = self.loaded(kind, config)
        self.check_padding(network, shape[-1])
        self.choose_trained(network)
        for part in network.modules():
            if isinstance(part, nn.Dropout):
                part.p = self.dropout
        form = Causal if self.head == "causal" else CausalClassifier if hasattr(network, "score") else Classifier
        network.__class__ = type(f"Pretrained{kind.__name__}", (form, kind), {"__module__": __name__})
        return network

    def kind_and_config(self, classes: int) -> tuple[Any, Any]:
        """The class of transformers, and its configuration, without dropout."""
        package, path = transformers(), str(self.path)
        try:
            config = package.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # of whatever kind transformers raises on a damaged or unknown configuration
            raise ValueError(
                f"folder: transformers cannot read {path}/{CONFIG} ({first_line(error)}); give a folder that "
                "save_pretrained has written"
            ) from error
        both_ways = type(config) in package.AutoModelForMaskedLM._model_mapping
        if self.head == "causal" and both_ways:
            raise ValueError(
                f"head: {config.model_type} reads both ways, so that next-token loss has no meaning; give head: "
                "classify"
            )
        auto = package.AutoModelForCausalLM if self.head == "causal" else package.AutoModelForSequenceClassification
        if type(config) not in auto._model_mapping:
            raise ValueError(f"head: transformers has no {self.head} model for {config.model_type}; choose another one")
        for name, value in config.to_dict().items():
            if isinstance(value, int | float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(config, name, 0.0)
        if self.head == "classify":
            config.num_labels = classes
        if not both_ways:  # else the embedding of the padding, which may be the end of texts, would not be trained
            config.pad_token_id = None
        return auto._model_mapping[type(config)], config

    def check(self, config: Any, length: int, classes: int) -> None:
        """Raise ValueError if the model has too few positions or tokens."""
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None and length > positions:
            raise ValueError(f"length: 1 <= length <= {positions} must hold, the model's positions, got {length}")
        if self.head == "causal" and classes > config.vocab_size:
            raise ValueError(
                f"tokens: ids up to {classes - 1}, but the model has {config.vocab_size} embeddings; use the model's "
                "own tokenizer"
            )

    @staticmethod
    def check_padding(network: nn.Module, length: int) -> None:
        """Raise ValueError if the model has too few positions because they begin behind that of the padding, as in
        RoBERTa."""
        for name, part in network.named_modules():
            padding = getattr(part, "padding_idx", None)
            if isinstance(part, nn.Embedding) and name.endswith("position_embeddings") and padding is not None:
                positions = part.num_embeddings - padding - 1
                if length > positions:
                    raise ValueError(
                        f"length: 1 <= length <= {positions} must hold, the model's positions, got {length}"
                    )

    def without_numbers(self, kind: Any, config: Any) -> Any:
        """The network whose parameters have no numbers. Its buffers follow from the configuration."""
        from transformers.initialization import no_init_weights  # pyright: ignore[reportMissingImports]

        with no_init_weights():
            network = kind._from_config(config, attn_implementation=self.attention)
        network.tie_weights()
        return network

    @staticmethod
    def draw(network: Any, names: Sequence[str]) -> None:
        """Give parameters of the network the numbers that transformers draws for those that are not in the files."""
        for name, (value, _) in parameters_of(network).items():
            value._is_hf_initialized = name not in names  # pyright: ignore[reportAttributeAccessIssue] of transformers
        network.initialize_weights()

    def stored(self, shape: tuple[int, ...], classes: int) -> StoredTensors | None:
        """The parameters that are in the files, by the network's own names. A head for classes may be missing. None
        where transformers makes some of several tensors of the files."""
        kind, config = self.kind_and_config(classes)
        with torch.device("meta"):
            network = self.without_numbers(kind, config)
        there = renamed(network, headers(self.path))
        found, missing, more = self.places(network, there)
        # The type in which transformers reads a model, before the run converts it to its own.
        own = getattr(config, "dtype", None)
        return None if missing or more else StoredTensors(found, () if own is None else (own,))

    def published(self, shape: tuple[int, ...], classes: int, p: Params) -> dict[str, Any]:
        """A folder as transformers writes it: numbers have the types of the base's files, and its tokeniser is there.

        A parameter that is tied to another one is there once, as the configuration says that it is tied.
        """
        kind, _ = self.kind_and_config(classes)
        places = self.stored(shape, classes)
        types = {} if places is None else {name: getattr(torch, CODES[at.dtype]) for name, at in places.places.items()}
        usual = next(iter(types.values()), torch.float32)
        config = {**self.settings(), "architectures": [kind.__name__]}
        tensors = {name: value.to(types.get(name, usual)) for name, value in p.items()}
        tokens = {name: (self.path / name).read_bytes() for name in OF_TOKENS if (self.path / name).is_file()}
        return {CONFIG: config, ONE: tensors, **tokens}

    def places(self, network: Any, there: Mapping[str, Place]) -> tuple[dict[str, Place], list[str], list[str]]:
        """(parameter -> where it is, the parameters that are not there, the tensors that are no parameter). A tied one
        may be there under any of its names. A head for classes may be missing, and another head be there."""
        tied: dict[int, list[str]] = {}
        for name, value in network.named_parameters(remove_duplicate=False):
            tied.setdefault(id(value), []).append(name)
        body = f"{network.base_model_prefix}."
        known = {name for names in tied.values() for name in names} | {name for name, _ in network.named_buffers()}
        known |= {name.removeprefix(body) for name in known}
        counted = (lambda name: name.startswith(body)) if self.head == "classify" else (lambda name: True)
        found: dict[str, Place] = {}
        missing: list[str] = []
        for names in tied.values():
            own = [name for name in (*names, *(each.removeprefix(body) for each in names)) if name in there]
            if own and there[own[0]].shape == tuple(network.get_parameter(names[0]).shape):
                found[names[0]] = there[own[0]]
            elif counted(names[0]):
                missing.append(own[0] if own else names[0])
        return found, missing, [name for name in there if name not in known and counted(name)]

    def check_headers(self, network: Any, kind: str) -> None:
        """Raise ValueError where the headers of the files show that they are those of another network: a tensor has
        another shape, or is missing, and there is none that transformers could make it of."""
        there = headers(self.path)
        found, missing, _ = self.places(network, there)
        more = {*there.values()} - {*found.values()}
        unfit = [name for name in missing if name in there]
        for names, what in ((unfit, "another shape of"), ([] if more else missing, "no")):
            if names:
                raise ValueError(
                    f"folder: {self.path} has {what} {few(names)}, and {kind} is built from it; give a folder whose "
                    "config.json belongs to its weights"
                )

    def loaded(self, kind: Any, config: Any) -> Any:
        """The network with the numbers of the files; a head that they do not have is drawn. Raises ValueError if they
        are not those of the network."""
        try:
            with without_progress():
                network, found = kind.from_pretrained(
                    str(self.path),
                    config=config,
                    attn_implementation=self.attention,
                    local_files_only=True,
                    use_safetensors=True,
                    dtype="auto",
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                )
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"folder: transformers cannot load {self.path} ({first_line(error)}); give a folder that "
                "save_pretrained has written"
            ) from error
        body = f"{network.base_model_prefix}."
        of_head = (lambda name: not name.startswith(body)) if self.head == "classify" else (lambda name: False)
        missing = sorted(name for name in found["missing_keys"] if not of_head(name))
        unfit = sorted(name for name, *_ in found["mismatched_keys"] if not of_head(name))
        more = sorted(name for name in found["unexpected_keys"] if not of_head(name))
        for names, what in ((missing, "no"), (unfit, "another shape of"), (more, "besides what it needs")):
            if names:
                raise ValueError(
                    f"folder: {self.path} has {what} {few(names)}, and {kind.__name__} is built from it; give a folder "
                    "whose config.json belongs to its weights"
                )
        return network.train()

    def choose_trained(self, network: nn.Module) -> None:
        """Freeze the parameters that no pattern of `train` matches. A pattern may name a tied tensor by any of its
        names. Raises ValueError for a pattern that matches none."""
        names: dict[int, list[str]] = {}
        for name, value in network.named_parameters(remove_duplicate=False):
            names.setdefault(id(value), []).append(name)
        known = [name for tied in names.values() for name in tied]
        for pattern in self.train:
            if not any(fnmatchcase(name, pattern) for name in known):
                near = get_close_matches(pattern.strip("*."), known, SHOWN, 0.3) or known[:SHOWN]
                raise ValueError(f"train: no parameter is called {pattern}; nearest are {', '.join(near)}")
        for value, _ in parameters_of(network).values():
            tied = names[id(value)]
            value.requires_grad_(any(fnmatchcase(name, pattern) for name in tied for pattern in self.train))
