"""Which plugins exist, what of a configuration is refused and how, and how a layer is built."""

import inspect
import shutil
import sys

import pytest
import torch
from hydra.utils import get_object
from omegaconf import OmegaConf

from archlab import plugins
from archlab.config import compose
from archlab.config.compose import load
from archlab.errors import UsageError
from archlab.mixer import Mixer
from archlab.model import build_model
from archlab.plugins import build_layer, check_keys, factory, names, nearest

SOURCE = '''
"""The mean of all tokens so far."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from archlab.errors import UsageError
from archlab.mixer import Mixer, State


@dataclass
class SumState(State):
    """total (b d): the sum of the tokens so far."""

    total: Tensor


class RunningMean(Mixer):
    def __init__(self, d_model: int, *, gain: float = 1.0, layer_idx: int):
        super().__init__()
        if gain <= 0:
            raise UsageError(f"gain={gain}: give a positive number")
        self.gain, self.layer_idx = gain, layer_idx
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def init_state(self, batch, max_len, *, device, dtype):
        return SumState(torch.zeros(batch, self.value.out_features, device=device, dtype=dtype))

    def forward(self, x, *, pos=0, state=None):
        total = self.value(x).cumsum(1)
        if state is not None:
            total = total + state.total[:, None]
            state.total.copy_(total[:, -1])
        count = torch.arange(1, x.shape[1] + 1, device=x.device)
        count = count + pos if isinstance(pos, int) else count + pos[:, None]
        return self.out(self.gain * total / count[..., None]), {}

    def mix_flops(self, context):
        return 2 * self.value.out_features
'''
YAML = """
_target_: {target}
_partial_: true
gain: 2.0
"""


@pytest.fixture
def own_plugin(tmp_path, monkeypatch):
    """One python file and one yaml file beside the shipped ones: what the author of a plugin adds."""
    conf = tmp_path / "conf"
    shutil.copytree(plugins.conf_dir(), conf)
    (tmp_path / "running_mean.py").write_text(SOURCE)
    (conf / "attn" / "mean.yaml").write_text(YAML.format(target="running_mean.RunningMean"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in (plugins, compose):
        monkeypatch.setattr(module, "conf_dir", lambda: conf)


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Installs a distribution `otherlab` whose entry point brings the given attention plugins."""

    def install(*plugin_names, package="otherlab"):
        root = tmp_path / package
        conf = root / package / "conf"
        (conf / "attn").mkdir(parents=True)
        (root / package / "__init__.py").touch()
        (conf / "__init__.py").touch()
        (root / package / "mean.py").write_text(SOURCE)
        for name in plugin_names:
            (conf / "attn" / f"{name}.yaml").write_text(YAML.format(target=f"{package}.mean.RunningMean"))
        info = root / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[archlab.plugins]\n{package} = {package}.conf\n")
        monkeypatch.syspath_prepend(str(root))

    yield install
    for name in [name for name in sys.modules if name.split(".")[0] in ("otherlab", "onelab", "twolab")]:
        del sys.modules[name]


# Which exist


def test_names_are_the_yaml_files():
    for group in plugins.GROUPS:
        assert names(group) == sorted(path.stem for path in (plugins.conf_dir() / group).glob("*.yaml"))
    assert {"mha", "gqa", "mqa", "swa", "mla", "kda_mla", "swa_gqa"} <= set(names("attn"))


@pytest.mark.slow
def test_every_shipped_plugin_builds_and_lists_all_of_its_parameters():
    for group in plugins.GROUPS:
        for name in names(group):
            node = load([f"{group}={name}"])[group]
            build_layer(factory(group, node), 256, layer_idx=0, n_layers=4)
            unlisted = set(inspect.signature(get_object(node["_target_"])).parameters)
            assert unlisted - set(node) <= set(plugins.HARNESS_ARGS), name


@pytest.mark.slow
def test_own_plugin_of_two_files_passes_the_contract(own_plugin):
    from archlab.testing import CHECKS, Variant

    assert "mean" in names("attn")
    for check in CHECKS:
        check(Variant("mean"))


def test_plugins_of_another_package(distribution):
    before = names("attn")
    distribution("mean")
    assert names("attn") == sorted([*before, "mean"])
    cfg = load(["attn=mean", "attn.gain=3.0", "model.d_model=16", "model.n_layers=2"])
    model = build_model(cfg, 11)
    assert [block.mixer.gain for block in model.blocks] == [3.0, 3.0]
    assert [block.mixer.layer_idx for block in model.blocks] == [0, 1]
    assert model(torch.zeros(1, 4, dtype=torch.long))[0].shape == (1, 4, 11)


def test_another_package_can_be_a_part_of_a_hybrid(distribution):
    distribution("mean")
    cfg = load(["attn=swa_gqa", "+attn@attn.parts.mean=mean", "attn.pattern=[mean,gqa]"])
    make = factory("attn", cfg.attn)
    kinds = [type(build_layer(make, 16, layer_idx=i, n_layers=2)).__name__ for i in range(2)]
    assert kinds == ["RunningMean", "GroupedQueryAttention"]


def test_a_name_of_two_packages_is_refused(distribution):
    distribution("gqa")
    with pytest.raises(UsageError, match=r"attn=gqa is defined twice, by .* and by .*otherlab"):
        names("attn")
    assert names("ffn")


def test_a_name_of_two_other_packages_is_refused(distribution):
    distribution("mean", package="onelab")
    distribution("mean", package="twolab")
    with pytest.raises(UsageError, match="attn=mean is defined twice"):
        names("attn")


# What is refused


class Part:
    def __init__(self, d_model: int, *, width: int | None = None, rate: float = 1.0, on: bool = True, kind: str = "x"):
        self.width = width


class Whole:
    def __init__(self, d_model: int, *, parts: dict, layer_idx: int, n_layers: int, order: list[str] | None = None):
        self.parts, self.place = parts, (layer_idx, n_layers)


class Swallower:
    def __init__(self, d_model: int, **kwargs):
        pass


PART = {"_target_": f"{__name__}.Part", "_partial_": True}


def whole(part=None, **keys):
    return {"_target_": f"{__name__}.Whole", "_partial_": True, "parts": {"one": PART | (part or {})}, **keys}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (PART | {"widht": 3}, "attn .*has no key 'widht'; did you mean 'width'?"),
        (PART | {"q": 3}, "no key 'q'; known: kind, on, rate, width"),
        (PART | {"d_model": 3}, "attn.d_model is set by the harness"),
        (PART | {"layer_idx": 3}, "attn.layer_idx is set by the harness"),
        (whole(n_layers=3), "attn.n_layers is set by the harness"),
        (whole({"widht": 3}), r"attn.parts.one .*has no key 'widht'; did you mean 'width'?"),
        (whole({"d_model": 3}), "attn.parts.one.d_model is set by the harness"),
        (whole(ordre=["one"]), "attn .*no key 'ordre'; did you mean 'order'?"),
        (PART | {"width": "wide"}, "attn.width='wide' must be a whole number or null"),
        (PART | {"width": 2.5}, "attn.width=2.5 must be a whole number"),
        (PART | {"width": True}, "attn.width=True must be a whole number"),
        (PART | {"rate": "fast"}, "attn.rate='fast' must be a number"),
        (PART | {"rate": None}, "attn.rate=None must be a number"),
        (PART | {"on": 1}, "attn.on=1 must be true or false"),
        (PART | {"kind": 3}, "attn.kind=3 must be text"),
        (whole({"rate": "fast"}), "attn.parts.one.rate='fast' must be a number"),
        ({"_target_": f"{__name__}.Swallower", "widht": 3}, r"attn .*Swallower\) takes any key by \*\*kwargs"),
        (PART | {"_target_": "nowhere.Part"}, "attn._target_=nowhere.Part cannot be loaded: No module named 'nowhere'"),
        (PART | {"_target_": f"{__name__}.Prat"}, "attn._target_=.*Prat cannot be loaded"),
        (whole({"_partial_": False}), "attn: .*missing 1 required positional argument: 'd_model'"),
    ],
)
def test_a_bad_configuration_is_one_sentence(node, message):
    with pytest.raises(UsageError, match=message) as refusal:
        factory("attn", node)
    assert "\n" not in str(refusal.value)


def test_good_values_pass():
    factory("attn", whole({"width": None, "rate": 3, "on": False, "kind": "y"}, order=["one"]))
    factory("attn", PART | {"width": 4, "rate": 0.5})


def test_the_model_may_set_what_a_plugin_may_not():
    check_keys("model", OmegaConf.create({"_target_": "archlab.model.LM", "d_model": 8, "n_layers": 1}))
    with pytest.raises(UsageError, match="no key 'd_modle'; did you mean 'd_model'"):
        check_keys("model", OmegaConf.create({"_target_": "archlab.model.LM", "d_modle": 8}))


def test_nearest_is_a_guess_or_the_list():
    assert nearest("windwo", ["window", "n_heads"]) == "did you mean 'window'?"
    assert nearest("zzz", ["window", "n_heads"]) == "known: n_heads, window"


# How a layer is built


def test_nested_partials_arrive_as_factories_and_the_place_is_passed():
    layer = build_layer(factory("attn", whole({"width": 7})), 16, layer_idx=2, n_layers=5)
    assert layer.place == (2, 5)
    assert build_layer(layer.parts["one"], 16, layer_idx=0, n_layers=1).width == 7
    assert type(layer.parts) is dict


def test_a_missing_parameter_names_the_plugin():
    class Needy(Mixer):
        def __init__(self, d_model, *, must):
            super().__init__()

    with pytest.raises(UsageError, match=r"test_plugins.*Needy.*'must'"):
        build_layer(Needy, 16, layer_idx=0, n_layers=1)


def test_a_plugin_without_a_forward_says_so():
    for call in (
        lambda: Mixer()(torch.zeros(1, 1, 1)),
        lambda: Mixer().init_state(1, 1, device=torch.device("cpu"), dtype=torch.float32),
        lambda: Mixer().mix_flops(1),
    ):
        with pytest.raises(NotImplementedError, match="Mixer must define"):
            call()


def test_broken_plugin_files_are_named(tmp_path, monkeypatch):
    (tmp_path / "broken_plugin.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=r"broken_plugin.Thing cannot be loaded: No module named 'not_installed"):
        factory("attn", {"_target_": "broken_plugin.Thing", "_partial_": True})
