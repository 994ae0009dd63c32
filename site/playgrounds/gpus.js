/* The GPUs by the memory in GB with which they are sold. Do not edit: `tools/write_gpus.py` writes
   this file from `src/amp_lab/core/gpus.py`. */
"use strict";

const AmpGpus = [
  { gb: 6, names: ["GTX 1660"] },
  { gb: 11, names: ["GTX 1080 Ti", "RTX 2080 Ti"] },
  { gb: 12, names: ["Arc B580"] },
  { gb: 16, names: ["P100", "V100", "T4", "Arc A770"] },
  { gb: 24, names: ["A10", "RTX 3090", "L4", "RTX 4090"] },
  { gb: 32, names: ["RTX 5090"] },
  { gb: 48, names: ["L40S"] },
  { gb: 64, names: ["MI210", "MI250X"] },
  { gb: 80, names: ["A100", "H100"] },
  { gb: 141, names: ["H200"] },
  { gb: 180, names: ["B200"] },
  { gb: 186, names: ["GB200"] },
  { gb: 192, names: ["MI300X"] },
  { gb: 256, names: ["MI325X"] },
  { gb: 270, names: ["B300"] },
  { gb: 288, names: ["MI350X", "MI355X"] },
];
