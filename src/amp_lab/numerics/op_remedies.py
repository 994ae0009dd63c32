"""Remedies of `find_nonfinite` for single ops, in the forward and in the backward pass."""

from amp_lab.core.remedies import Remedy, remedy


def nonfinite_remedy(code: str, when: str, text: str, failure: str = "") -> Remedy:
    """Define a remedy of `find_nonfinite`: `remedy` with ``nonfinite.`` before its code."""
    return remedy(f"nonfinite.{code}", when, text, failure)


ATTENTION_KERNEL = nonfinite_remedy(
    "attention_kernel",
    "attention made a NaN of finite inputs",
    "Query, key and value are finite, and attention only averages the values, so the kernel may "
    "be wrong. On an NVIDIA GPU, call torch.backends.cuda.enable_cudnn_sdp(False) and repeat the "
    "step. If the NaN is still there, run attention with "
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), which uses plain ops. If "
    "the result is then finite, use another kernel or another version of torch. If not, the next "
    "report names the op inside attention.",
    failure="AMP0113",
)

# Keys are beginnings of names of ops, with spaces between; the first key that fits is taken.
BACKWARD = {
    "sqrt": nonfinite_remedy(
        "backward.sqrt",
        "the backward pass of sqrt at 0",
        "The derivative of sqrt is infinite at 0. Use torch.sqrt(x + 1e-6).",
        failure="AMP0002",
    ),
    "rsqrt": nonfinite_remedy(
        "backward.rsqrt",
        "the backward pass of rsqrt near 0",
        "The derivative of rsqrt is infinite at 0, and near 0 it exceeds the range of fp16. Use "
        "torch.rsqrt(x + 1e-2).",
    ),
    "pow": nonfinite_remedy(
        "backward.pow",
        "the backward pass of a power below 1 at 0",
        "The derivative of a power below 1 is infinite at 0. Use (x + 1e-6) ** p.",
    ),
    "log1p": nonfinite_remedy(
        "backward.log1p",
        "the backward pass of log1p at -1",
        "The derivative of log1p is infinite at -1. Use torch.log1p(x.clamp_min(-0.99)).",
    ),
    "logbackward log2backward log10backward": nonfinite_remedy(
        "backward.log",
        "the backward pass of a logarithm at 0",
        "The derivative of log is infinite at 0. Use torch.log(x.clamp_min(1e-4)). If a "
        "torch.where discards the result of the log, replace the input before the log as well, "
        "because 0 * inf is NaN.",
    ),
    "div reciprocal": nonfinite_remedy(
        "backward.div",
        "the backward pass of a division by nearly 0",
        "The divisor is nearly 0, so the derivative is very large. If b is not negative, use a / "
        "(b + 1e-2) in fp16.",
    ),
    "linalgeig linalgsvd": nonfinite_remedy(
        "backward.linalg",
        "the backward pass of a decomposition with equal eigenvalues or singular values",
        "The derivative is undefined at equal eigenvalues or singular values. Add different "
        "offsets to the diagonal: x + torch.eye(*x.shape[-2:], device=x.device) * "
        "torch.linspace(1e-3, 1e-2, x.shape[-1], device=x.device).",
    ),
    "acosh": nonfinite_remedy(
        "backward.acosh",
        "the backward pass of acosh at 1",
        "The derivative of acosh is infinite at 1. Use torch.acosh(x.clamp_min(1.01)).",
    ),
    "acos asin": nonfinite_remedy(
        "backward.acos",
        "the backward pass of acos or asin at -1 or 1",
        "The derivative of acos and asin is infinite at -1 and 1. Clamp the input: x.clamp(-0.99, "
        "0.99) in 16 bits.",
    ),
}
FORWARD = {
    "scaled_dot_product flash_attention efficient_attention cudnn_attention": ATTENTION_KERNEL,
    "logit": nonfinite_remedy(
        "logit",
        "logit of 0 or 1",
        "The result of logit is infinite at 0 and 1. Use torch.logit(x.float(), eps=1e-6). Keep "
        "the cast: on a CPU, 1 - eps is 1 in 16 bits.",
    ),
    "log1p": nonfinite_remedy(
        "log1p",
        "log1p of -1 or less",
        "The result of log1p is -inf at -1 and NaN below -1. Use torch.log1p(x.clamp_min(-0.99)).",
    ),
    "log": nonfinite_remedy(
        "log",
        "a logarithm of 0 or of a negative number",
        "The log of 0 is -inf, and the log of a negative number is NaN. Clamp the input with "
        "x.clamp_min(1e-4), or use a function that takes logits: log_softmax, logsigmoid, "
        "binary_cross_entropy_with_logits.",
        failure="AMP0111",
    ),
    "xlogy": nonfinite_remedy(
        "xlogy",
        "xlogy of a second argument that is 0 or negative",
        "The second argument of xlogy is 0 or negative, so its logarithm is -inf or NaN. Clamp the "
        "second argument.",
    ),
    "div": nonfinite_remedy(
        "div",
        "a division by 0",
        "The divisor is 0. If it is 0 only because it was rounded to 16 bits, as 1 - 0.9999 is in "
        "bf16, compute it in fp32, from values that were never in 16 bits: an eps would hide a "
        "wrong result. Otherwise, add an eps to the divisor or clamp the divisor (F.normalize has "
        "an eps). In fp16, compute this part in fp32, on x.float(), with an eps of 1e-3 or more: "
        "a gradient can be 1 / eps, and a smaller eps with a loss scale of 65536 makes it "
        "overflow in fp16.",
    ),
    "reciprocal": nonfinite_remedy(
        "reciprocal",
        "the reciprocal of 0",
        "The input is 0. If it is never negative, use x.float().clamp_min(1e-3).reciprocal(). "
        "Keep the cast: the derivative, 1 / x ** 2, is inf in fp16.",
    ),
    "rsqrt": nonfinite_remedy(
        "rsqrt",
        "rsqrt of 0 or of a negative number",
        "The input is 0 or negative. Use torch.rsqrt(x.clamp_min(0) + 1e-2).",
    ),
    "sqrt": nonfinite_remedy(
        "sqrt",
        "the root of a negative number",
        "The input is negative. Use torch.sqrt(x.clamp_min(0)). If you need gradients, use "
        "x.clamp_min(1e-6) instead: the derivative is infinite at 0.",
    ),
    "exp": nonfinite_remedy(
        "exp",
        "an exponential out of range",
        "The exponential overflows in fp16 from 11.1 on, and in fp32 and bf16 from 88.8 on. "
        "Subtract the largest value first, as softmax and logsumexp do, or use softplus. Instead "
        "of 1 / (1 + exp(-x)), use torch.sigmoid.",
    ),
    "acosh": nonfinite_remedy(
        "acosh",
        "acosh of a number below 1",
        "The input of acosh must be at least 1. Use torch.acosh(x.clamp_min(1.01)).",
    ),
    "acos asin": nonfinite_remedy(
        "acos",
        "acos or asin of a number outside [-1, 1]",
        "The input of acos and asin must be from -1 to 1. Use x.clamp(-1, 1), or x.clamp(-0.99, "
        "0.99) if you need gradients.",
    ),
    "std": nonfinite_remedy(
        "std",
        "the standard deviation of a single value",
        "The standard deviation of a single value is NaN. Use correction=0, or more values.",
    ),
    "var": nonfinite_remedy(
        "var",
        "the variance of a single value",
        "The variance of a single value is NaN. Use correction=0, or more values.",
    ),
    "nll_loss": nonfinite_remedy(
        "nll_loss",
        "a mean over no targets",
        "The loss has no targets to average: all targets are ignore_index, or all class weights "
        "are 0. Use reduction='sum' and divide by max(number of targets, 1).",
        failure="AMP0112",
    ),
    "to_copy": nonfinite_remedy(
        "cast",
        "a value that does not fit the dtype that it is cast to",
        "The value does not fit the dtype that it is cast to. Clamp the value before the cast. "
        "Instead of fp16, you can also use bf16.",
    ),
}
