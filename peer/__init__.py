"""The training daemon. `finetune.py` is the entry; `wiring.py` and `learner.py` put the parts together, `assist.py` those of a peer that assists.

Every room offers modules behind `contracts.py`.
"""

from swarm.lazy_hub import import_without_hub

# diffusers and peft import it to ask for its quantized layers, of which a model here has none: a sixth of a real trainer's start. Whoever wants
# its optimizers (loop/optim.py) gets the whole.
import_without_hub("bitsandbytes")
# transformers' losses of detectors and diffusers' samplers import them: a seventh of the start that is left. A sampler that computes with them
# (beta sigmas, LMS) gets the whole.
import_without_hub("scipy.optimize", linear_sum_assignment="_lsap")
import_without_hub("scipy.integrate")
import_without_hub("scipy.stats")
