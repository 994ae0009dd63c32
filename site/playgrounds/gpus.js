/* The GPUs by the memory in GB with which they are sold. Do not edit: `tools/write_gpus.py` writes
   this file from `src/amp_lab/core/gpus.py`. */
"use strict";

const AmpGpus = [
  { gb: 6, names: ["GTX 1660"] },
  { gb: 8, names: ["RTX 5060"] },
  { gb: 11, names: ["GTX 1080 Ti", "RTX 2080 Ti"] },
  { gb: 12, names: ["RTX 5070", "Arc B580"] },
  { gb: 16, names: ["P100", "V100", "T4", "RTX 5080", "RTX 5070 Ti", "RTX 5060 Ti", "RX 9060 XT", "RX 9070 XT", "Arc A770", "Arc Pro B50"] },
  { gb: 24, names: ["A10", "RTX 3090", "L4", "RTX 4090", "RX 7900 XTX", "Arc Pro B60"] },
  { gb: 32, names: ["RTX 5090", "AI PRO R9700", "Arc Pro B70"] },
  { gb: 48, names: ["L40S"] },
  { gb: 64, names: ["MI210", "MI250X"] },
  { gb: 80, names: ["A100", "H100"] },
  { gb: 96, names: ["RTX PRO 6000"] },
  { gb: 141, names: ["H200"] },
  { gb: 144, names: ["MI350P"] },
  { gb: 180, names: ["B200"] },
  { gb: 186, names: ["GB200"] },
  { gb: 192, names: ["MI300X"] },
  { gb: 256, names: ["MI325X"] },
  { gb: 270, names: ["B300"] },
  { gb: 288, names: ["MI350X", "MI355X"] },
];
