{{/* An image's reference; arguments: root, image (cuda, rocm, airflow or spark). */}}
{{- define "batchllm.image" -}}
{{- $images := .root.Values.images -}}
{{- $image := index $images .image -}}
{{- $repository := $image.repository -}}
{{- with $images.registry -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) $repository -}}
{{- end -}}
{{- $reference := printf "%s:%s" $repository (default .root.Chart.AppVersion $image.tag) -}}
{{- with $image.digest -}}
{{- $reference = printf "%s@%s" $reference . -}}
{{- end -}}
{{- $reference -}}
{{- end -}}

{{- define "batchllm.imagePullSecrets" -}}
{{- range .Values.images.pullSecrets }}
- name: {{ . | quote }}
{{- end }}
{{- end -}}
