"""Small runs: PPO on a model of a few thousand parameters, and a recipe of toy components whose
results do not depend on the layout."""

import shutil
from pathlib import Path

TOY = Path(__file__).parents[1] / "launch/toy"

TINY_PPO = (
    "models.actor.path=null",
    (
        "models.actor.scratch={model_type: llama, hidden_size: 32, intermediate_size: 64, "
        "num_hidden_layers: 2, num_attention_heads: 4, max_position_embeddings: 128, "
        "tie_word_embeddings: true}"
    ),
    "models.actor.tokenizer=builtin:arithmetic",
    "datasets.train.args.problems=64",
    "datasets.held_out.args.problems=8",
    "generation.max_new_tokens=6",
    "train.prompts_per_step=8",
    "train.eval.every_steps=null",
    "log.plot=false",
    "log.trackers=[]",
    "train.steps=2",
)

RECIPE = """\
seed: 5
toy: {seconds: 0.0}
models:
  actor:
    scratch: {model_type: llama, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1,
              num_attention_heads: 1}
    tokenizer: builtin:toy_rows
    backend: toy
  critic: {init: actor, head: value, backend: toy}
  reward: {backend: null}
datasets:
  train: {type: toy_rows, args: {rows: 20}}
  held_out: {type: toy_rows, args: {rows: 5}}
graph:
  gen: {model: actor, call: generate, interface: {type: toy, args: "${toy}"},
        inputs: [packed_prompts], outputs: [packed_input_ids, prompt_mask, packed_logprobs]}
  score: {model: reward, call: inference, interface: toy_reward,
          inputs: [packed_input_ids], outputs: [rewards, solved]}
  value: {model: critic, call: inference, interface: toy,
          inputs: [packed_input_ids, packed_logprobs], outputs: [values]}
  train_actor: {model: actor, call: train_step, interface: {type: toy, args: "${toy}"},
                inputs: [packed_input_ids, prompt_mask, packed_logprobs, rewards, solved, values]}
  train_critic: {model: critic, call: train_step, interface: toy,
                 inputs: [packed_input_ids, prompt_mask, packed_logprobs, rewards, solved, values]}
train:
  steps: 3
  prompts_per_step: 8
  eval:
    dataset: held_out
    every_steps: 2
    graph:
      eval_gen: {model: actor, call: generate, interface: toy, inputs: [packed_prompts],
                 outputs: [packed_input_ids, prompt_mask]}
      eval_score: {model: reward, call: inference, interface: toy_reward,
                   inputs: [packed_input_ids], outputs: [rewards, solved]}
      eval_fit: {model: critic, call: evaluate, interface: toy, inputs: [packed_prompts],
                 max_tokens_per_microbatch: 9}
cluster: {device: cpu}
launch: {type: inline, startup_deadline: 300, step_deadline: 60}
log: {trackers: [], plot: false, samples_per_step: 2}
"""


def make_project(folder: Path) -> Path:
    """Write the components into a folder as a user's project."""
    (folder / "pyproject.toml").write_text("[tool.rlcli]\n")
    for source in TOY.glob("*.txt"):
        kind, _, name = source.stem.partition("-")
        (folder / kind).mkdir(exist_ok=True)
        shutil.copy(source, folder / kind / f"{name}.py")
    return folder
