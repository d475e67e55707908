"""Matrix products: matmul, convolution, attention and recurrent ops."""

ROWS = """
# op                                family         numerics cast  cost  cpu     cuda    mps     dtypes
matmul                              matmul         allow    all   flops lower   lower   lower   any
mm                                  matmul         allow    all   flops lower   lower   lower   any
bmm                                 matmul         allow    all   flops lower   lower   lower   any
mv                                  matmul         allow    all   flops -       lower   lower   any
addmm                               matmul         allow    all   flops lower   lower   lower   one
addbmm                              matmul         allow    all   flops lower   lower   lower   one
baddbmm                             matmul         allow    all   flops lower   lower   lower   one
addmv                               matmul         allow    all   flops -       lower   lower   one
addr                                matmul         allow    all   flops -       lower   lower   any
linear                              matmul         allow    all   flops lower   lower   lower   any
bilinear                            matmul         allow    all   flops -       promote promote any
einsum                              matmul         allow    all   flops lower   lower   lower   any
tensordot                           matmul         allow    all   flops lower   promote promote any
inner                               matmul         allow    all   flops lower   promote promote any
dot                                 matmul         allow    all   flops -       promote promote any
vdot                                matmul         allow    all   flops -       promote -       any
chain_matmul                        matmul         allow    all   flops lower   lower   lower   any
matrix_power                        matmul         allow    all   flops lower   lower   lower   any
linalg_vecdot                       matmul         allow    all   flops lower   lower   fp32    any
linalg_multi_dot                    matmul         allow    all   flops lower   lower   lower   any
grouped_mm                          matmul         allow    all   flops -       -       -       any
scaled_mm                           matmul         allow    all   flops -       -       -       any
scaled_grouped_mm                   matmul         allow    all   flops -       -       -       any
_addmm_activation                   matmul         allow    all   flops lower   -       -       any
outer                               matmul         infer    all   bytes -       -       -       any
kron                                matmul         infer    all   bytes -       -       -       any
conv1d                              convolution    allow    all   flops lower   lower   lower   any
conv2d                              convolution    allow    all   flops lower   lower   lower   any
conv3d                              convolution    allow    all   flops lower   lower   lower   any
conv_transpose1d                    convolution    allow    all   flops lower   lower   lower   any
conv_transpose2d                    convolution    allow    all   flops lower   lower   lower   any
conv_transpose3d                    convolution    allow    all   flops lower   lower   fp32    any
conv_tbc                            convolution    allow    all   flops lower   lower   lower   any
convolution                         convolution    allow    all   flops -       lower   lower   any
_convolution                        convolution    allow    all   flops -       lower   lower   any
scaled_dot_product_attention        attention      allow    all   flops lower   lower   lower   any
_native_multi_head_attention        attention      allow    all   flops lower   -       -       any
_transformer_encoder_layer_fwd      attention      allow    all   flops -       -       -       any
lstm                                recurrent      allow    all   flops lower   lower   -       any
gru                                 recurrent      allow    all   flops -       lower   -       any
rnn_tanh                            recurrent      allow    all   flops lower   lower   lower   any
rnn_relu                            recurrent      allow    all   flops lower   lower   lower   any
lstm_cell                           recurrent      allow    all   flops -       lower   lower   any
gru_cell                            recurrent      allow    all   flops -       lower   -       any
rnn_tanh_cell                       recurrent      allow    all   flops lower   lower   lower   any
rnn_relu_cell                       recurrent      allow    all   flops lower   lower   lower   any
"""
