"""Reductions and scans."""

ROWS = """
# op                                family         numerics cast  cost  cpu     cuda    mps     dtypes
sum                                 reduction      deny     all   bytes -       fp32    fp32    any
mean                                reduction      deny     all   bytes -       -       -       any
nansum                              reduction      deny     all   bytes -       -       -       any
nanmean                             reduction      deny     all   bytes -       -       -       any
var                                 reduction      deny     all   bytes -       -       -       any
std                                 reduction      deny     all   bytes -       -       -       any
var_mean                            reduction      deny     all   bytes -       -       -       any
std_mean                            reduction      deny     all   bytes -       -       -       any
norm                                reduction      deny     all   bytes -       fp32    fp32    any
dist                                reduction      deny     all   bytes -       fp32    fp32    any
linalg_norm                         reduction      deny     all   bytes -       fp32    fp32    any
linalg_vector_norm                  reduction      deny     all   bytes -       fp32    fp32    any
linalg_matrix_norm                  reduction      deny     all   bytes -       fp32    fp32    any
frobenius_norm                      reduction      deny     all   bytes -       fp32    fp32    any
nuclear_norm                        reduction      deny     all   bytes -       fp32    fp32    any
trace                               reduction      deny     all   bytes fp32    -       -       any
cov                                 reduction      deny     all   bytes lower   lower   -       any
corrcoef                            reduction      deny     all   bytes lower   lower   -       any
trapezoid                           reduction      deny     all   bytes -       fp32    fp32    any
cumulative_trapezoid                reduction      deny     all   bytes -       fp32    fp32    any
segment_reduce                      reduction      deny     all   bytes -       -       -       any
quantile                            reduction      deny     all   bytes fp32    -       -       any
nanquantile                         reduction      deny     all   bytes fp32    -       -       any
histc                               reduction      deny     all   bytes -       -       -       any
sum_to_size                         reduction      deny     all   bytes -       -       -       any
prod                                reduction      infer    all   bytes fp32    fp32    fp32    any
max                                 reduction      clear    all   bytes -       -       -       any
min                                 reduction      clear    all   bytes -       -       -       any
amax                                reduction      clear    all   bytes -       -       -       any
amin                                reduction      clear    all   bytes -       -       -       any
aminmax                             reduction      clear    all   bytes -       -       -       any
median                              reduction      clear    all   bytes -       -       -       any
nanmedian                           reduction      clear    all   bytes -       -       -       any
mode                                reduction      clear    all   bytes -       -       -       any
kthvalue                            reduction      clear    all   bytes -       -       -       any
topk                                reduction      clear    all   bytes -       -       -       any
sort                                reduction      clear    all   bytes -       -       -       any
msort                               reduction      clear    all   bytes -       -       -       any
argmax                              reduction      clear    none  bytes -       -       -       any
argmin                              reduction      clear    none  bytes -       -       -       any
argsort                             reduction      clear    none  bytes -       -       -       any
all                                 reduction      clear    none  bytes -       -       -       any
any                                 reduction      clear    none  bytes -       -       -       any
count_nonzero                       reduction      clear    none  bytes -       -       -       any
bincount                            reduction      clear    none  bytes -       -       -       any
histogram                           reduction      clear    none  bytes -       -       -       any
histogramdd                         reduction      clear    none  bytes -       -       -       any
cumsum                              scan           deny     all   bytes -       fp32    fp32    any
cumprod                             scan           deny     all   bytes -       fp32    fp32    any
cummax                              scan           clear    all   bytes -       -       -       any
cummin                              scan           clear    all   bytes -       -       -       any
"""
