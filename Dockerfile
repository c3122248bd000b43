# SGLang's image with sgl-kvpool beside it, for a wheel in dist/:
#
#     make wheel && docker build --tag sglang-kvpool .
#
# Start containers as with SGLang's image: SGLang loads the plugin by itself. In the container, `sgl-kvpool doctor`
# says whether the plugin works there, and `sgl-kvpool warmup` compiles what a server would compile.
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
FROM ${SGLANG_IMAGE}

COPY dist/sgl_kvpool-*.whl /tmp/
# The image has all dependencies; with --no-deps pip never replaces the image's SGLang or torch.
RUN python3 -m pip install --no-cache-dir --no-deps /tmp/sgl_kvpool-*.whl \
 && rm /tmp/sgl_kvpool-*.whl \
 && sgl-kvpool layouts
