"""A convolution on the CPU whose backward pass needs no scratch of the size of its weight.

oneDNN computes a float32 weight gradient in a layout of its own and then reorders it: twice the weight, and
more where its threads reduce in private copies. One backward pass on two cores, torch 2.14:

    weight 4096x512x7x7 (411 MB), input 4x512x7x7: oneDNN 822 MB, 1.4 s; im2col 412 MB, 0.6 s
    weight 512x512x3x3 (9.4 MB), input 4x512x2x2:  oneDNN 85 MB, 0.07 s; im2col 10 MB, 0.09 s

PyTorch's own im2col path holds the gradient and the unfolded input, and the latter is smaller than the weight
exactly where late layers see small maps. The forward pass and the gradient of the input stay oneDNN's, to the bit;
the weight gradient differs by rounding. So does a bias gradient, whose true value is zero before a BatchNorm, and
then nothing but rounding remains: a convolution with a bias comes here only for 32 MiB of weight or more.
In bfloat16 oneDNN takes no such scratch (4.9 MB for the second row), so only float32 comes here.

Shapes: x (B, C, H, W), weight (O, C, kh, kw), bias (O,), output (B, O, Ho, Wo).
"""

import torch
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

WORTH_A_BIAS = 2**23  # elements of a weight, 32 MiB


class Im2colConv2d(torch.autograd.Function):
    """torch.conv2d with one group, weight gradient by im2col; the gradients can be differentiated again."""

    @staticmethod
    def forward(ctx, x, weight, bias, stride, padding, dilation):
        ctx.save_for_backward(x, weight)
        ctx.geometry = stride, padding, dilation
        return torch.conv2d(x, weight, bias, stride, padding, dilation)

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        arguments = grad_output, x, weight, [weight.shape[0]], *ctx.geometry, False, [0, 0], 1
        # oneDNN's own: what flows on to earlier layers stays the same to the bit
        grad_x = torch.ops.aten.convolution_backward(*arguments, [need_x, False, False])[0]
        before = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = False  # what makes PyTorch take its im2col path
        try:
            _, *others = torch.ops.aten.convolution_backward(*arguments, [False, need_weight, need_bias])
        finally:
            torch.backends.mkldnn.enabled = before
        return grad_x, *others, None, None, None


class small_map_convolutions(TorchFunctionMode):
    """Within, float32 CPU convolutions with a weight larger than their unfolded input get its gradient by im2col.

    Every other call is left as it is: other devices and dtypes, autocast, groups, frozen weights, large maps.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.conv2d:
            return _conv2d(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    plain = (
        groups != 1
        or isinstance(padding, str)
        or input.dim() != 4
        or not (torch.is_grad_enabled() and weight.requires_grad)
        or not (input.device.type == weight.device.type == "cpu")
        or not (input.dtype == weight.dtype == torch.float32)
        or torch.is_autocast_enabled("cpu")
        or (bias is not None and weight.numel() < WORTH_A_BIAS)
    )
    if not plain:
        stride, padding, dilation = _pair(stride), _pair(padding), _pair(dilation)
        positions = input.shape[0]
        for size, kernel, s, p, d in zip(input.shape[2:], weight.shape[2:], stride, padding, dilation):
            positions *= (size + 2 * p - d * (kernel - 1) - 1) // s + 1
        if weight.shape[0] > positions:  # weight and unfolded input share the factor C kh kw
            return Im2colConv2d.apply(input, weight, bias, stride, padding, dilation)
    return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
