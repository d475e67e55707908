"""Norms, softmaxes and losses."""

ROWS = """
# op                                family         numerics cast  cost  cpu     cuda    mps     dtypes
layer_norm                          norm           infer    first bytes -       fp32    fp32    any
rms_norm                            norm           infer    first bytes -       fp32    -       any
batch_norm                          norm           infer    first bytes -       -       fp32    any
group_norm                          norm           infer    first bytes -       fp32    fp32    any
instance_norm                       norm           infer    first bytes -       -       fp32    any
native_layer_norm                   norm           infer    first bytes -       fp32    fp32    any
native_group_norm                   norm           infer    first bytes -       -       -       any
native_batch_norm                   norm           infer    first bytes -       -       -       any
_fused_rms_norm                     norm           infer    first bytes -       -       -       any
normalize                           norm           deny     all   bytes -       fp32    -       any
norm_except_dim                     norm           deny     all   bytes -       fp32    -       any
renorm                              norm           deny     all   bytes -       fp32    fp32    any
_weight_norm                        norm           deny     all   bytes -       -       -       any
softmax                             softmax        infer    all   bytes -       fp32    fp32    any
log_softmax                         softmax        infer    all   bytes -       fp32    fp32    any
softmin                             softmax        infer    all   bytes -       fp32    fp32    any
log_sigmoid                         softmax        infer    all   bytes -       -       -       any
_softmax                            softmax        infer    all   bytes -       -       -       any
_log_softmax                        softmax        infer    all   bytes -       -       -       any
logsumexp                           softmax        deny     all   bytes -       fp32    fp32    any
logcumsumexp                        softmax        deny     all   bytes -       -       -       any
logaddexp                           softmax        deny     all   bytes -       -       -       any
logaddexp2                          softmax        deny     all   bytes -       -       -       any
cross_entropy                       loss           deny     all   bytes fp32    fp32    fp32    any
nll_loss                            loss           deny     all   bytes fp32    fp32    fp32    any
binary_cross_entropy                loss           deny     all   bytes fp32    -       -       any
binary_cross_entropy_with_logits    loss           deny     all   bytes fp32    fp32    fp32    any
mse_loss                            loss           deny     all   bytes fp32    fp32    fp32    any
l1_loss                             loss           deny     all   bytes fp32    fp32    fp32    any
smooth_l1_loss                      loss           deny     all   bytes fp32    fp32    fp32    any
huber_loss                          loss           deny     all   bytes fp32    fp32    fp32    any
kl_div                              loss           deny     all   bytes fp32    fp32    fp32    any
ctc_loss                            loss           deny     all   bytes fp32    -       -       any
poisson_nll_loss                    loss           deny     all   bytes fp32    fp32    fp32    any
margin_ranking_loss                 loss           deny     all   bytes fp32    fp32    fp32    any
hinge_embedding_loss                loss           deny     all   bytes fp32    fp32    fp32    any
multilabel_margin_loss              loss           deny     all   bytes fp32    fp32    fp32    any
soft_margin_loss                    loss           deny     all   bytes fp32    fp32    fp32    any
cosine_embedding_loss               loss           deny     all   bytes fp32    fp32    fp32    any
multi_margin_loss                   loss           deny     all   bytes fp32    fp32    fp32    any
triplet_margin_loss                 loss           deny     all   bytes fp32    fp32    fp32    any
cosine_similarity                   loss           deny     all   bytes -       fp32    fp32    any
pairwise_distance                   loss           deny     all   bytes -       fp32    -       any
linear_cross_entropy                loss           deny     all   flops -       -       -       any
cdist                               loss           deny     all   flops fp32    fp32    fp32    any
pdist                               loss           deny     all   flops -       fp32    fp32    any
"""
