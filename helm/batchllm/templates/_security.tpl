{{/* Security contexts. */}}

{{/* A pod's; arguments: root, user, group, supplementalGroups. */}}
{{- define "batchllm.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ int64 .user }}
runAsGroup: {{ int64 .group }}
fsGroup: {{ int64 .root.Values.pods.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
{{- with .supplementalGroups }}
supplementalGroups:
{{- range . }}
  - {{ int64 . }}
{{- end }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "batchllm.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
